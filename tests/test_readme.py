"""The README's program runs."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs(capsys):
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    assert len(program.strip().splitlines()) <= 40
    exec(compile(program, str(README), "exec"), {})
    text = capsys.readouterr().out
    first, last = map(float, re.match(r"(\S+) -> (\S+)", text).groups())
    assert last < first
    assert "all_reduce" in text and "[Shard(0), Shard(1)] on ProcessMesh(dp=2, tp=4)" in text
