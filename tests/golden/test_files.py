"""The files are small and each is described."""

from pathlib import Path

FOLDER = Path(__file__).parent


def test_every_file_is_small_and_described():
    text = (FOLDER / "README.md").read_text()
    sections = {line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")}
    files = {path.stem: path.stat().st_size for path in FOLDER.glob("*.safetensors")}
    assert sections == files.keys()
    assert all(f"| `{name}` |" in text for name in files)
    assert max(files.values()) < 100_000
