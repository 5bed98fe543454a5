"""The store's folders for what outlives a process and is no result."""

from pathlib import Path

from compressor.run.store import Store


def test_what_was_staged_in_the_cache_goes_and_an_empty_cache_too(tmp_path: Path):
    store = Store(tmp_path / "out" / "store")
    (store.cache / ".staging-of-the-killed").mkdir(parents=True)
    with store.locked():
        assert list(store.cache.iterdir()) == []
    assert not (tmp_path / "out").exists(), "nothing was finished"


def test_the_cache_and_trainings_last_until_they_are_forgotten(tmp_path: Path):
    store = Store(tmp_path / "out" / "store")
    with store.locked():
        (store.cache / "data-1").mkdir(parents=True)
        store.training("a1").mkdir()
        store.training("a0").mkdir()
    with store.locked():
        assert [f.name for f in store.cache.iterdir()] == ["data-1"]
        assert store.trainings() == [store.training("a0"), store.training("a1")]
        store.forget()
        assert not store.cache.exists()
        assert store.trainings() == []
