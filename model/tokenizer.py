"""A small byte-level BPE tokenizer for agents that write JSON calls: few tokens of syntax, and ids that can be copied token by token."""

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
PADDING = "<|pad|>"
SPECIAL_TOKENS = (PADDING, START_OF_TURN, END_OF_TURN)

MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

# What is never merged with its neighbours, so that it is the same token wherever it stands, and copying it is to find it once: a number
# of up to four digits (with the dash before it, as in a date), a capital before a number, as in C412, a capitalised word, and a quote.
# All else may become one token, however long, which makes episodes of JSON about a third shorter than with words kept apart.
_ALONE = r"-?[0-9]{1,4}|[A-Z](?=[0-9])|[A-Z][a-z]+|'"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of at most `vocab_size` tokens, trained on `texts`; `decode(encode(text)) == text` for any text.

    All 256 bytes are tokens, so nothing is unknown. Special tokens: padding, start of turn, and end of turn, which is also
    the end-of-sequence token. Raises ValueError when the vocabulary has no room for those.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB_SIZE} (256 bytes and the special tokens), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_ALONE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START_OF_TURN,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
    )
