"""What a command says before anything is asked of Kafka: that `--out` is a folder, in one line; its version."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from gorila.cli import main


@pytest.mark.parametrize("out", [".", "/"])
@pytest.mark.parametrize("command", [["report", "x"], ["weights", "get", "x", "--version", "1"]])
def test_a_folder_is_not_a_file_to_write(command: list[str], out: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--out", out])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"gorila: --out {out}: a folder, not a file to write\n"


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"gorila {version('gorila-stream')}\n"
