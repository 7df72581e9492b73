"""Questions and answers from library code."""

import pytest
import torch

from lightning_megatrain.recipes.bytes_data import is_validation
from lightning_megatrain.recipes.stdlib_pairs import INSTRUCTION, StdlibPairs, functions

SOURCE = '''
class Box:
    @property
    def weight(self):
        """Return what the box weighs.

        In kilograms.
        """
        # the lid is not counted
        return self.mass - self.lid

    def bare(self):
        """Nothing but a docstring stands here."""

    def short(self): "Docstring and code share a line."; return self.mass + self.lid

    async def fetch(self, label):
        "Fetch the box that has this label."
        return await self.store.find(label, kind="box")

    def unspoken(self):
        return self.mass + self.lid + self.contents
'''


def test_functions_lose_their_docstring_and_keep_the_rest(tmp_path):
    path = tmp_path / "box.py"
    path.write_text(SOURCE)
    (line, source, answer), (_, fetch, fetched) = functions(path, 600)
    assert line == 4
    assert source == "def weight(self):\n    # the lid is not counted\n    return self.mass - self.lid"
    assert answer == "Return what the box weighs."
    assert fetch.startswith("async def fetch(self, label):\n    return await")
    assert fetched == "Fetch the box that has this label."
    assert list(functions(path, 50)) == []


def test_a_file_that_does_not_parse_has_no_functions(tmp_path):
    path = tmp_path / "old.py"
    path.write_text("print 'hello'")
    assert list(functions(path, 600)) == []


def small(**kwargs):
    data = StdlibPairs(max_records=60, max_val_records=10, vocab_size=600, batch_size=2, **kwargs)
    data.setup("fit")
    return data


def test_pairs_are_bounded_split_by_file_and_repeat():
    data = small()
    found = list(data.records())
    assert [sum(side is wanted for side, *_ in found) for wanted in (False, True)] == [60, 10]
    for side, place, (question, answer) in found:
        assert side == is_validation(place.path.relative_to(data.root))
        assert question["content"].startswith(INSTRUCTION)
        assert answer["content"] not in question["content"] or "\n" not in answer["content"]
    first, again = (next(iter(small().train_dataloader())) for _ in range(2))
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert first["input_ids"].shape == (2, 256)
    assert int(first["input_ids"].max()) < 600
    labels = first["labels"]
    assert "<|im_end|>" in data.decode(labels[labels >= 0])


def test_the_tokenizer_may_come_from_elsewhere_but_must_fit():
    with pytest.raises(ValueError, match=r"data\.tokenizer"):
        small(tokenizer="/nowhere")


@pytest.mark.parametrize("wrong", [{"max_records": 0}, {"max_source_chars": 3}])
def test_bounds_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        StdlibPairs(**wrong)
