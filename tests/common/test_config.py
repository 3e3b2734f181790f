from __future__ import annotations

from pathlib import Path

import pytest

from common.config import (
    CoordinatorSettings,
    ServeSettings,
    Tier,
    parse_coordinator,
    parse_serve,
    parse_worker,
)
from common.endpoints import Endpoint
from common.errors import BadConfiguration
from common.flags import GROUPS, _extra, build_parser, flag_name, parse_bytes, to_argv, visible_fields
from common.http_settings import API_KEY_VARIABLE
from common.worker_settings import EngineSettings, WorkerSettings

WHAT_A_KEY_IS = "a key is printable ASCII, with no blanks and no commas"
SETTINGS = (WorkerSettings, CoordinatorSettings, ServeSettings)


def serve(*argv: str) -> ServeSettings:
    return parse_serve(argv, {})


def refusal(*argv: str) -> str:
    with pytest.raises(BadConfiguration) as refused:
        serve(*argv)
    assert refused.value.exit_code == 2
    assert "\n" not in refused.value.message
    return refused.value.message


def write(folder: Path, text: str) -> str:
    path = folder / "kvferry.toml"
    path.write_text(text)
    return str(path)


def test_defaults_serve_one_of_each_on_port_8000() -> None:
    settings = serve()
    assert (settings.prefill, settings.decode, settings.host, settings.port) == (1, 1, "127.0.0.1", 8000)
    assert settings.shutdown_timeout == 30
    assert settings.model_name == "smollm2-135m-instruct"


@pytest.mark.parametrize("model", SETTINGS)
def test_every_flag_is_in_help_with_a_known_group(model: type[WorkerSettings]) -> None:
    text = build_parser(model, "kvferry", "").format_help()
    for name in visible_fields(model) - {"tiers", "collocated"}:
        assert flag_name(name) in text
        assert _extra(model.model_fields[name])["group"] in GROUPS
    assert "parent-fd" not in text


def test_help_shows_defaults_as_a_person_would_write_them() -> None:
    text = " ".join(build_parser(ServeSettings, "kvferry serve", "").format_help().split())
    assert "such as 2GiB; absent: 512MiB on a CPU, on a GPU what --gpu-memory-utilization leaves" in text
    assert "the workers of `kvferry serve` share it (default: 0.9)" in text
    assert "such as 4MiB (default: 4MiB)" in text
    assert "SIGTERM or Ctrl-C (default: 30)" in text
    assert "reuse the KV of a prompt's beginning (default: on)" in text


def test_flags_of_the_contract_are_there() -> None:
    names = (
        "model served-model-name host port api-key dtype device max-model-len max-num-seqs max-num-batched-tokens "
        "block-size num-kv-blocks kv-cache-memory enable-prefix-caching seed transfer prefix-cache-scope prefill decode"
    )
    text = build_parser(ServeSettings, "kvferry serve", "").format_help()
    assert [name for name in names.split() if f"--{name}" not in text] == []
    assert "--no-enable-prefix-caching" in text
    assert "--advertise HOST:PORT" in build_parser(WorkerSettings, "kvferry prefill", "").format_help()


def test_command_line_wins_over_file_wins_over_default(tmp_path: Path) -> None:
    config = write(tmp_path, "max_num_seqs = 3\nblock_size = 32\n")
    settings = serve("--config", config, "--max-num-seqs", "9")
    assert (settings.max_num_seqs, settings.block_size, settings.max_queue) == (9, 32, 1024)


def test_one_file_serves_all_commands(tmp_path: Path) -> None:
    config = write(
        tmp_path, 'port = 9000\nadvertise = "127.0.0.1:4000"\nblock_size = 32\n[tiers.batch]\nweight = 1\n'
    )
    assert parse_worker(["--config", config], "decode").block_size == 32
    assert parse_worker(["--config", config], "decode").advertise == "127.0.0.1:4000"
    assert parse_coordinator(["--config", config], {}).port == 9000
    assert serve("--config", config).block_size == 32


def test_tiers_come_from_the_file_and_default_is_always_there(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        "[tiers.interactive]\nttft_ms = 500\nitl_ms = 75\npriority = 0\nweight = 4\nmax_queue = 256\n",
    )
    tiers = serve("--config", config).all_tiers
    assert tiers["interactive"] == Tier(ttft_ms=500, itl_ms=75, priority=0, weight=4, max_queue=256)
    assert tiers["default"] == Tier()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_num_seq = 3", ["'max_num_seq'", "did you mean max_num_seqs?"]),
        ("parent_fd = 3", ["unknown key 'parent_fd'"]),
        ("[tiers.a]\nweigth = 3", ["'tiers.a.weigth'", "did you mean weight?"]),
        ("[tiers.a]\nttft_ms = -1", ["tiers.a.ttft_ms", "greater than 0", "-1"]),
        (
            "[tiers.a]\napi_key_file = 3",
            ["kvferry.toml: tiers.a.api_key_file: expected the path of a file, in quotes"],
        ),
        ("api_key_file = [3]", ["kvferry.toml: api_key_file: expected the path of a file, in quotes"]),
        ("[tiers.a]\nweight = 5e-324", ["kvferry.toml: tiers.a.weight", "equal to 0.001", "5e-324"]),
        ("[tiers.a]\nttft_ms = nan", ["tiers.a.ttft_ms", "finite"]),
        ("[tiers.a]\nttft = 5", ["kvferry.toml", "'tiers.a.ttft'", "did you mean ttft_ms?"]),
        ("tiers = 5", ["kvferry.toml: tiers: expected tables", "[tiers.NAME]", "5"]),
        ("tiers.a = 5", ["kvferry.toml: tiers.a: expected a table", "[tiers.a]", "5"]),
        (
            "[tiers]\nttft_ms = 5",
            ["tiers.ttft_ms: expected a table", "ttft_ms is a key of one, and stands under [tiers.NAME]"],
        ),
        ('[tiers.a]\nttft_ms = "500"', ["tiers.a.ttft_ms: expected a number", "without quotes", "'500'"]),
        ('port = "8124"', ["kvferry.toml: port: expected a number", "without quotes", "'8124'"]),
        ("max_num_seqs = true", ["max_num_seqs: expected a number", "True"]),
        ("enable_prefix_caching = 0", ["enable_prefix_caching: expected true or false", "0"]),
        ("kv_cache_memory = false", ["kv_cache_memory"]),
        ("port = [1]", ["kvferry.toml: port: ", "[1]"]),
        ("api_key = [1]", ["kvferry.toml: api_key.0: "]),
        ("port = ", ["not TOML"]),
        ("collocated = true", ["collocated", "prefill = 0"]),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    message = refusal("--config", write(tmp_path, text))
    assert [word for word in words if word not in message] == []


def test_a_table_of_another_kind_of_name_gets_no_suggestion(tmp_path: Path) -> None:
    message = refusal("--config", write(tmp_path, "[pools]\nprefill = 2"))
    assert "unknown key 'pools'" in message
    assert "did you mean" not in message


def test_a_flag_that_overrules_the_file_is_named_as_a_flag(tmp_path: Path) -> None:
    assert refusal("--config", write(tmp_path, "port = 1"), "--port", "x").startswith("--port: ")


def test_a_cache_of_too_few_blocks_is_refused_with_the_least_that_is_of_use(tmp_path: Path) -> None:
    assert "--num-kv-blocks 1: " in (said := refusal("--num-kv-blocks", "1")) and "; 4 is the least" in said
    assert "; 2 is the least" in refusal("--num-kv-blocks", "1", "--block-size", "32")
    assert refusal("--config", write(tmp_path, "num_kv_blocks = 3")).startswith("--num-kv-blocks 3: ")
    assert serve("--num-kv-blocks", "4").num_kv_blocks == 4
    assert serve("--num-kv-blocks", "2", "--max-model-len", "20").num_kv_blocks == 2


def test_seed_is_a_flag_where_it_has_an_effect_and_a_key_of_every_file(tmp_path: Path) -> None:
    assert serve("--config", write(tmp_path, "seed = 5")).seed == 5
    assert parse_worker(["--config", write(tmp_path, "seed = 5")], "decode").model is None
    with pytest.raises(BadConfiguration, match="--seed"):
        parse_worker(["--seed", "5"], "decode")


def test_a_tiers_keys_are_keys_of_the_service(tmp_path: Path) -> None:
    for name, text in (("gold", "g1\ng2\n"), ("tin", "t1\n")):
        (tmp_path / name).write_text(text)
    config = write(
        tmp_path, "".join(f'[tiers.{n}]\napi_key_file = "{tmp_path / n}"\n' for n in ("gold", "tin"))
    )
    settings = serve("--config", config, "--api-key", "other")
    assert settings.api_keys == ("other", "g1", "g2", "t1")
    assert settings.tiers["gold"].api_key_file == ("g1", "g2")


@pytest.mark.parametrize(
    ("text", "words", "secret"),
    [
        (
            "good\n\ntwo words\n",
            ["tiers.gold.api_key_file: ", f"/gold, line 3: {WHAT_A_KEY_IS}"],
            "two words",
        ),
        ("# é\nclé-s\n", [f"/gold, line 2: {WHAT_A_KEY_IS}"], "-s"),
        ("a\x7fb\n", [f"/gold, line 1: {WHAT_A_KEY_IS}"], "a\x7f"),
        ("a\x85b\n", [f"/gold, line 1: {WHAT_A_KEY_IS}"], "a\x85"),
        ("", ["tiers.gold.api_key_file", "holds no key"], "secret"),
        ("taken\n", ["one key is in the api_key_file of both gold and tin"], "taken"),
    ],
)
def test_a_bad_file_of_a_tiers_keys_is_refused_and_no_key_is_shown(
    tmp_path: Path, text: str, words: list[str], secret: str
) -> None:
    (tmp_path / "gold").write_text(text)
    (tmp_path / "tin").write_text("taken\n")
    config = write(
        tmp_path, "".join(f'[tiers.{n}]\napi_key_file = "{tmp_path / n}"\n' for n in ("gold", "tin"))
    )
    message = refusal("--config", config)
    assert [word for word in words if word not in message] == [] and secret not in message


def test_a_tier_that_no_request_could_name_is_refused(tmp_path: Path) -> None:
    message = refusal("--config", write(tmp_path, "[tiers.auto]\nweight = 2\n"))
    assert "kvferry.toml: tiers.auto: " in message


@pytest.mark.parametrize("name", ["", "x" * 65, "a\\nb", " gold"])
def test_a_tier_has_a_name_that_fits_a_label(name: str, tmp_path: Path) -> None:
    message = refusal("--config", write(tmp_path, f'[tiers."{name}"]\nweight = 2\n'))
    _, _, fault = message.partition("kvferry.toml: ")
    assert fault.startswith(f"tiers.'{name[:64]}")
    assert "1 to 64 printable characters" in fault and len(fault) < 200
    assert list(serve("--config", write(tmp_path, f'[tiers."{"é" * 64}"]\nweight = 2\n')).tiers) == ["é" * 64]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prot", "3"], ["--prot", "did you mean --port?"]),
        (["--port", "x"], ["--port", "integer", "'x'"]),
        (["--port", "70000"], ["--port", "65535"]),
        (["--max-num", "3"], ["unknown flag --max-num"]),
        (["--dtype", "bf16"], ["--dtype", "'bfloat16'", "'bf16'"]),
        (["--decode", "0"], ["--decode", "greater than or equal to 1"]),
        (["--num-kv-blocks", str(10**12)], ["--num-kv-blocks", "less than or equal to"]),
        (["--max-model-len", str(10**12)], ["--max-model-len", "less than or equal to"]),
        (["--max-num-batched-tokens", str(10**9)], ["--max-num-batched-tokens", "less than or equal to"]),
        (["--threads", str(10**6)], ["--threads", "less than or equal to"]),
        (["--kv-cache-memory", "2 parsec"], ["--kv-cache-memory", "2GiB"]),
        (["--shutdown-timeout", "inf"], ["--shutdown-timeout", "finite"]),
        (["--transfer", "ucx"], ["--transfer", "'gloo'", "'ucx'"]),
        (["--config", "/nowhere/x.toml"], ["/nowhere/x.toml", "No such file"]),
        (["--worker-timeout", "0.5"], ["--worker-timeout", "--heartbeat-interval"]),
        (["stray"], ["unexpected argument stray"]),
        (["--port"], ["--port", "expected one argument"]),
    ],
)
def test_a_bad_command_line_is_refused_in_one_line(argv: list[str], words: list[str]) -> None:
    message = refusal(*argv)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    "flag", ["--tensor-parallel-size", "-tp", "--pipeline_parallel_size", "--data-parallel-size", "--dp-size"]
)
def test_BR_147_parallelism_that_is_not_there_is_refused_in_words(flag: str, tmp_path: Path) -> None:
    """Also at 1 and in a file: nothing of the kind is passed over."""
    words = "kvferry serve --prefill N" if "d" in flag.split("-p")[0] else "each worker holds all of it"
    for size in ("2", "1"):
        assert flag in refusal(flag, size) and words in refusal(flag, size)
        with pytest.raises(BadConfiguration, match=words):
            parse_worker([flag, size], "decode")
    key = flag.strip("-").replace("-", "_")
    assert words in refusal("--config", write(tmp_path, f"{key} = 2"))
    assert "unknown flag --tensorboard" in refusal("--tensorboard"), "what only begins alike is not meant"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2GiB", 2 << 30),
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("10kB", 10_000),
        ("4096", 4096),
        ("1G", 10**9),
    ],
)
def test_byte_sizes(text: str, number: int) -> None:
    assert parse_bytes(text) == number
    assert serve("--kv-cache-memory", text).kv_cache_memory == number


# --- a GPU ---


@pytest.mark.parametrize("share", ["0", "-0.1", "1.01", "90%", "nan", "inf"])
def test_a_share_of_a_gpu_that_is_none_is_refused_by_name(share: str) -> None:
    assert "--gpu-memory-utilization" in refusal(f"--gpu-memory-utilization={share}")


def test_settings_of_a_gpu_come_from_flags_and_file(tmp_path: Path) -> None:
    assert serve().gpu_memory_utilization == 0.9 and not serve().enforce_eager
    path = write(tmp_path, "gpu_memory_utilization = 0.5\nenforce_eager = true")
    assert serve("--config", path).gpu_memory_utilization == 0.5 and serve("--config", path).enforce_eager
    worker = parse_worker(["--gpu-memory-utilization", "1", "--enforce-eager"], "decode")
    assert worker.gpu_memory_utilization == 1 and worker.enforce_eager
    assert worker.attention_variant == serve().attention_variant == "invariant"
    assert serve("--attention-variant", "fast").attention_variant == "fast"
    assert "--attention-variant" in refusal("--attention-variant", "faster")


# --- who may reach what ---


def test_http_beyond_loopback_needs_a_key_or_a_word() -> None:
    assert "--allow-unauthenticated" in refusal("--host", "0.0.0.0")
    assert "--allow-unauthenticated" in refusal("--host", "my-machine.example")
    assert serve("--host", "0.0.0.0", "--allow-unauthenticated").open_to_all
    assert not serve("--host", "0.0.0.0", "--api-key", "k").open_to_all
    assert not serve("--host", "::1").open_to_all
    assert not serve("--host", "127.0.0.2", "--allow-unauthenticated").open_to_all


def test_an_empty_key_is_no_key(tmp_path: Path) -> None:
    empty = tmp_path / "keys"
    empty.write_text("\n# nobody yet\n")
    assert "holds no key" in refusal("--api-key-file", str(empty)), "a secret that is not there opens no door"
    assert "blanks" in refusal("--host", "0.0.0.0", "--api-key", "")
    with pytest.raises(BadConfiguration):
        parse_serve(["--host", "0.0.0.0"], {API_KEY_VARIABLE: " , "})


def test_keys_of_flags_files_and_environment_add_up(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("three\n\n# a comment\n  four\n")
    argv = ["--api-key", "one", "--api-key", "two", "--api-key-file", str(keys)]
    settings = parse_coordinator(argv, {API_KEY_VARIABLE: "five,one"})
    assert settings.api_keys == ("one", "two", "three", "four", "five")


def test_one_tenant_is_no_tier_and_one_key_at_most(tmp_path: Path) -> None:
    assert serve().one_tenant and serve("--api-key", "a", "--api-key", "a").one_tenant
    assert not serve("--api-key", "a", "--api-key", "b").one_tenant
    assert not serve("--config", write(tmp_path, "[tiers.default]\nttft_ms = 500")).one_tenant


def test_a_file_may_give_one_key_without_brackets(tmp_path: Path) -> None:
    assert serve("--config", write(tmp_path, 'api_key = "abc"')).api_keys == ("abc",)


def test_a_refusal_never_prints_a_key(tmp_path: Path) -> None:
    assert refusal("--api-key", "s3cret with blanks") == f"--api-key: {WHAT_A_KEY_IS}"
    assert refusal("--api-key", "s3crét") == f"--api-key: {WHAT_A_KEY_IS}"
    assert "s3cret" not in refusal("--config", write(tmp_path, 'api_key = "s3cret with blanks"'))


def test_a_bad_key_of_the_environment_is_laid_to_its_variable() -> None:
    with pytest.raises(BadConfiguration) as refused:
        parse_serve([], {API_KEY_VARIABLE: "s3cret key"})
    assert refused.value.message == f"{API_KEY_VARIABLE}: {WHAT_A_KEY_IS}"


@pytest.mark.parametrize("flag", ["--coordinator=tcp://", "--advertise=", "--bind="])
@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "gpu7", "[::]", "[fe80::1%eth0]"])
def test_worker_sockets_leave_loopback_with_a_key_only(flag: str, host: str) -> None:
    with pytest.raises(BadConfiguration, match=r"encrypted.*kvferry keys new.*--curve-key"):
        parse_worker([f"{flag}{host}:5000"], "prefill")
    parse_worker([f"{flag}127.0.0.1:5000"], "prefill")
    parse_worker([f"{flag}[::1]:5000"], "prefill")
    if host in ("10.0.0.1", "gpu7"):
        parse_worker([f"{flag}{host}:5000", "--curve-key", "k"], "prefill")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--coordinator=tcp://0.0.0.0:5000", "the one that it is reached at"),
        ("--coordinator=tcp://[::]:5000", "the one that it is reached at"),
        ("--coordinator=tcp://*:5000", "the one that it is reached at"),
        ("--coordinator=tcp://10.0.0.1:*", "expected tcp://HOST:PORT"),
        ("--coordinator=tcp://::1:5000", "in brackets: tcp://[::1]:8701"),
        ("--advertise=0.0.0.0:5000", "means nothing on another machine"),
        ("--advertise=[fe80::1%eth0]:5000", "means nothing on another machine"),
        ("--advertise=::1:5000", "in brackets: [::1]:8701"),
        ("--advertise=10.0.0.1:65535", "the next is used too"),
        ("--advertise=10.0.0.1:*", "the next is used too"),
        ("--advertise=10.0.0.1", "expected HOST:PORT"),
        ("--bind=tcp://10.0.0.1:5000", "expected HOST:PORT"),
    ],
)
def test_an_address_of_a_worker_that_leads_nowhere_is_refused(argument: str, words: str) -> None:
    with pytest.raises(BadConfiguration) as refused:
        parse_worker(["--curve-key", "k", argument], "decode")
    assert argument.replace("=", " ") in refused.value.message and words in refused.value.message


def test_where_a_worker_listens_may_differ_from_what_is_told() -> None:
    def worker(*argv: str) -> WorkerSettings:
        return parse_worker(["--curve-key", "k", *argv], "decode")

    assert (worker().bound, worker().advertised) == (None, None)
    told = worker("--advertise", "gpu7.example:5000")
    assert told.bound == told.advertised == Endpoint("gpu7.example", 5000)
    both = worker("--advertise", "203.0.113.5:5000", "--bind", "[::]:6000")
    assert (both.bound, both.advertised) == (Endpoint("::", 6000), Endpoint("203.0.113.5", 5000))


@pytest.mark.parametrize("transfer", ["gloo", "nccl"])
@pytest.mark.parametrize(
    "argument",
    [
        "--coordinator=tcp://10.0.0.1:5000",
        "--coordinator=tcp://localhost.example:5000",
        "--advertise=10.0.0.1:5000",
        "--bind=*:5000",
    ],
)
def test_process_groups_leave_loopback_with_a_word_of_trust_only(transfer: str, argument: str) -> None:
    """The cluster's key is not enough: they do not know it."""
    argv = [argument, "--transfer", transfer, "--curve-key", "k"]
    with pytest.raises(BadConfiguration) as refused:
        parse_worker(argv, "decode")
    for word in (f"--transfer {transfer}", argument.partition("=")[0], "--curve-key", "Say --trust-network"):
        assert word in refused.value.message
    assert parse_worker([*argv, "--trust-network"], "decode").transfer == transfer
    assert parse_worker([argument, "--curve-key", "k"], "decode").transfer == "auto"
    assert parse_worker(["--transfer", transfer], "decode").trust_network is False


def test_a_service_with_process_groups_leaves_loopback_with_a_word_of_trust_only() -> None:
    argv = ["--transfer", "gloo", "--control", "tcp://10.0.0.1:5000", "--curve-key", "k"]
    assert "--transfer gloo with --control 10.0.0.1:5000" in refusal(*argv)
    assert serve(*argv, "--trust-network").trust_network
    assert serve("--transfer", "gloo").transfer == "gloo"


def test_control_leaves_loopback_with_a_key_only_and_may_pick_its_port(tmp_path: Path) -> None:
    for host in ("10.0.0.1", "0.0.0.0", "*", "[::]", "[fd00::1]"):
        control = f"tcp://{host}:5000"
        with pytest.raises(BadConfiguration, match=r"--curve-key FILE"):
            parse_coordinator(["--control", control], {})
        assert parse_coordinator(["--control", control, "--curve-key", "k"], {}).control == control
    in_file = write(tmp_path, 'control = "tcp://10.0.0.1:5000"\ncurve_key = "k"')
    assert parse_coordinator(["--config", in_file], {}).curve_key == Path("k").absolute()
    assert "tcp://HOST:PORT" in refusal("--control", "127.0.0.1:5000")
    assert "tcp://HOST:PORT" in refusal("--control", "tcp://127.0.0.1:0")
    assert serve().control == "tcp://127.0.0.1:*"
    assert "name one address" in refusal("--control", "tcp://0.0.0.0:5000", "--curve-key", "k")


def test_whole_batches_are_for_collocated_service(tmp_path: Path) -> None:
    assert serve().batching == "continuous"
    settings = serve("--prefill", "0", "--batching", "dynamic")
    assert settings.batch_timeout_s == 0.05
    worker = parse_worker([*to_argv(settings, visible_fields(EngineSettings))], "decode")
    assert (worker.batching, worker.batch_timeout_s) == ("dynamic", 0.05)
    assert serve("--prefill", "0", "--batching", "dynamic", "--batch-timeout-ms", "0").batch_timeout_s == 0
    assert "say --prefill 0" in refusal("--batching", "dynamic")
    assert "batching is continuous" in refusal("--prefill", "0", "--batch-timeout-ms", "5")
    config = write(tmp_path, 'batching = "dynamic"')
    with pytest.raises(BadConfiguration, match="not with prefill workers"):
        parse_worker(["--config", config], "prefill")


# --- handing settings to a child ---


def test_a_child_gets_what_its_parent_has_even_against_a_file(tmp_path: Path) -> None:
    config = write(tmp_path, "max_queue = 7\nblock_size = 32\nenable_prefix_caching = false\n")
    parent = serve("--config", config, "--max-queue", "1024", "--host", "::1", "--seed", "5")
    fields = visible_fields(CoordinatorSettings) - {"collocated", "tiers"}
    child = parse_coordinator([*to_argv(parent, fields), "--config", config], {})
    assert {name: getattr(child, name) for name in fields} == {name: getattr(parent, name) for name in fields}
    worker = parse_worker(to_argv(parent, visible_fields(EngineSettings)), "decode")
    assert worker.block_size == 32
    assert worker.enable_prefix_caching is False


def test_a_chat_template_is_a_file_that_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert serve("--chat-template", str(file)).chat_template == file.absolute()
    assert "--chat-template: " in refusal("--chat-template", str(tmp_path / "none.jinja"))
    file.write_bytes(b"\xff\xfe")
    assert "cannot read it" in refusal("--chat-template", str(file))
    assert "--tool-call-parser" in refusal("--tool-call-parser", "other")
