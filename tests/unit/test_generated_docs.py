"""Documents made from code say what the code says."""

from __future__ import annotations

from pathlib import Path

from gorila import generated_docs
from gorila.settings import known_keys, preset_names
from gorila.topics import TOPOLOGY


def test_the_documents_are_fresh() -> None:
    assert generated_docs.stale() == [], "run `make docs`"


def test_a_change_is_noticed(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    for path, text in generated_docs.pages().items():
        copy = tmp_path / path.relative_to(generated_docs.ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    monkeypatch.setattr(generated_docs, "ROOT", tmp_path)
    assert generated_docs.stale() == []
    page = tmp_path / "docs/configuration.md"
    page.write_text(page.read_text().replace("learner.batch_size", "learner.batchsize"))
    assert generated_docs.stale() == ["docs/configuration.md"]


def test_every_key_preset_and_topic_is_in_them() -> None:
    configuration = (generated_docs.ROOT / "docs/configuration.md").read_text()
    assert all(f"`{key}`" in configuration for key in known_keys())
    assert all(f"| {preset} |" in configuration for preset in preset_names())
    architecture = (generated_docs.ROOT / "ARCHITECTURE.md").read_text()
    assert all(f"| {topic.name} |" in architecture for topic in TOPOLOGY)
