"""A tokenizer without transformers, whose import alone takes longer than a driver has to start."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

    #: What a chat template can use.
    AnyTokenizer: TypeAlias = "FastTokenizer | PreTrainedTokenizerBase"

#: Arguments of transformers' `apply_chat_template` that are no variables of the template.
_OPTIONS = {
    *("documents", "continue_final_message", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    "sanitize_control_tokens",
}


class FastTokenizer:
    """What drivers ask of a tokenizer, answered as transformers' `TokenizersBackend` does.

    Everything else is asked of the transformers tokenizer itself, which is made at the first such
    question. Safe to use from several threads.

    Args:
        backend: The `tokenizers.Tokenizer`, without truncation and padding.
        special_tokens: By name (``eos_token``); all are added tokens of `backend`.
        chat_template: Jinja text; None where it has none.
        whole: Makes the transformers tokenizer.
    """

    def __init__(
        self,
        backend: Any,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        whole: Callable[[], PreTrainedTokenizerBase],
    ) -> None:
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(special_tokens)
        self.chat_template = chat_template
        self._make_whole = whole

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __bool__(self) -> bool:
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._whole(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying and pickling ask for what is not there
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return getattr(self._whole, name)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens beside those of the model's vocabulary, by id."""
        tokens: dict[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return tokens

    @property
    def eos_token_id(self) -> int | None:
        """The end token; None where there is none."""
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The padding token; None where there is none."""
        return self._named_id("pad_token")

    def get_vocab(self) -> dict[str, int]:
        """Ids by token, added tokens included."""
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """The ids of a text."""
        if options or not isinstance(text, str):
            return list(self._whole.encode(text, add_special_tokens=add_special_tokens, **options))
        ids: list[int] = self.backend_tokenizer.encode(
            text, add_special_tokens=add_special_tokens
        ).ids
        return ids

    def decode(
        self,
        token_ids: Iterable[int],
        skip_special_tokens: bool = False,
        *,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """The text of ids."""
        if clean_up_tokenization_spaces or not _are_ids(token_ids):
            whole: Any = self._whole
            text: str = whole.decode(
                token_ids,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            )
        else:
            text = self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """The text that a template makes of a conversation, where ``tokenize=False``.

        Args:
            conversation: Messages as mappings.
            tools: OpenAI-style function dicts.
            chat_template: Jinja text in the place of the tokenizer's own.
            add_generation_prompt: Whether the opening of an assistant's turn ends the text.
            tokenize: True for ids, by transformers.
            variables: What the template can read beside the special tokens' names.
        """
        source = self.chat_template if chat_template is None else chat_template
        is_usual = _are_mappings(conversation) and (not tools or _are_mappings(tools))
        if tokenize or source is None or not is_usual or _OPTIONS & variables.keys():
            whole: Any = self._whole
            return whole.apply_chat_template(
                conversation,
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=tokenize,
                **variables,
            )
        from rollout.chat.jinja_chat import render_chat

        return render_chat(
            source,
            conversation,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables={**self.special_tokens_map, **variables},
        )

    @cached_property
    def _whole(self) -> PreTrainedTokenizerBase:
        return self._make_whole()

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        token_id: int | None = None if token is None else self.backend_tokenizer.token_to_id(token)
        return token_id


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and (not value or isinstance(value[0], int))


def _are_mappings(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(each, dict) for each in value)
    )
