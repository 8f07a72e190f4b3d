"""What the README shows in Python runs."""

import pathlib
import re

README = pathlib.Path(__file__).parents[2] / "README.md"


def test_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
    assert "lower bound" in capsys.readouterr().out
