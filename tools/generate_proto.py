"""Generate *_pb2.py and *_pb2.pyi beside every .proto file of the workspace."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MYPY_HEADER = '# mypy: disable-error-code="type-arg"\n'
"""protoc writes `Mapping` without its types, which strict checking refuses."""


def main() -> None:
    for source_root in sorted({*ROOT.glob("libs/*/src"), *ROOT.glob("services/*/src")}):
        protos = sorted(str(p.relative_to(source_root)) for p in source_root.rglob("*.proto"))
        if protos:
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "grpc_tools.protoc",
                    f"-I{source_root}",
                    f"--python_out={source_root}",
                    f"--pyi_out={source_root}",
                    *protos,
                ],
                check=True,
            )
            for proto in protos:
                stub = (source_root / proto).with_suffix("").with_name(Path(proto).stem + "_pb2.pyi")
                stub.write_text(MYPY_HEADER + stub.read_text())


if __name__ == "__main__":
    main()
