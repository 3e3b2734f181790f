"""The two roles, and what a worker is called that has changed from one to the other. Pure.

Why another id: counters and rows of one life are not to be shown under the role of the other. It is made from the first
one, so that nobody else has it, and changing back brings that one back.
"""

from __future__ import annotations

from common.messages import Role


def other_role(role: Role) -> Role:
    return "decode" if role == "prefill" else "prefill"


def id_in_other_role(worker_id: str, role: Role) -> str:
    """`role`: the present one. "decode-1" is "prefill-from-decode-1" as a prefill worker, and the other way round."""
    made_from = f"{role}-from-"
    if worker_id.startswith(made_from):
        return worker_id.removeprefix(made_from)
    return f"{other_role(role)}-from-{worker_id}"
