import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from model.tokenizer import MIN_VOCAB_SIZE, train_tokenizer

CALL = '<tool_call>{"name":"transfer","arguments":{"from_account":"A207","to_account":"A648","amount":364}}</tool_call>'
TOKENIZER = train_tokenizer([CALL, "move 364 from savings to A207", '[{"kind":"savings","account_id":"A207"}]'] * 20, 600)


def pieces(text: str) -> list[str]:
    return [TOKENIZER.decode([token]) for token in TOKENIZER.encode(text)]


@given(st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.binary())
def test_any_bytes_that_are_text_survive(data: bytes) -> None:
    text = data.decode("utf-8", errors="replace")
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_an_id_is_its_capital_and_its_number_wherever_it_stands() -> None:
    assert pieces("A207") == ["A", "207"]
    assert pieces('"A207"')[1:-1] == ["A", "207"]
    assert pieces("to A207.")[-3:-1] == ["A", "207"]


@pytest.mark.parametrize("alone", ["364", "-03", "1984", "A", "Ada", "'"])
def test_what_is_copied_merges_with_nothing_around_it(alone: str) -> None:
    text = f"x{alone}5" if alone == "A" else f"x{alone} x"
    tokenizer = train_tokenizer([text] * 50, 600)
    assert alone in [tokenizer.decode([token]) for token in tokenizer.encode(text)]


def test_the_syntax_of_a_call_is_one_token_up_to_its_first_value() -> None:
    assert pieces(CALL)[0] == '<tool_call>{"name":"transfer","arguments":{"from_account":"'
    assert pieces(CALL)[-1] == "}}</tool_call>"


def test_the_end_of_a_turn_is_the_end_of_sequence_token_and_padding_is_another() -> None:
    assert TOKENIZER.eos_token == "<|im_end|>"
    assert TOKENIZER.pad_token == "<|pad|>"
    assert len({TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id}) == 3


def test_training_is_the_same_each_time() -> None:
    assert train_tokenizer([CALL], 300).get_vocab() == train_tokenizer([CALL], 300).get_vocab()


def test_a_saved_tokenizer_loads_as_it_was(tmp_path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode(CALL) == TOKENIZER.encode(CALL)
    assert (loaded.eos_token_id, loaded.pad_token_id) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 259"):
        train_tokenizer([CALL], MIN_VOCAB_SIZE - 1)
