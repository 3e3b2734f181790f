"""Writes a GGUF file again with 16-bit weights, so that OpenVINO computes what the others do: gguf_f16.py FROM TO.

OpenVINO GenAI reads GGUF. The default model's file is quantised; kept so, the peer would read a quarter of the bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize

SAID_BY_THE_WRITER = ("general.architecture", "general.file_type")


def convert(source: Path, target: Path) -> None:
    """Appears by one rename, whole."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    partial = target.with_suffix(".partial")
    writer = GGUFWriter(partial, architecture)
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in SAID_BY_THE_WRITER:
            continue
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32 if values.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
