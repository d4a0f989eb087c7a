"""Stop strings: which completions have just said one."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ssgrpo_lightning.policy import Codec


class StopStrings:
    """Looks for stop strings in the text of growing completions.

    A string may begin and end within tokens, so text is looked at, not token ids. It is decoded
    only where the last token could be the end of a string: at the ends of lines for a string that
    ends with one, not at every token.

    Args:
        codec: Tokens to text.
        strings: Strings that end a completion; it keeps them.
    """

    def __init__(self, codec: Codec, strings: Sequence[str]) -> None:
        self.codec, self.strings = codec, tuple(strings)
        self.ends = {string[-1] for string in strings}
        self._could_end: dict[int, bool] = {}

    def said(self, completions: Int[Tensor, "rollout new"]) -> Bool[Tensor, " rollout"]:
        """True for completions whose text so far contains one."""
        last = completions[:, -1].tolist()
        found = [self._may_end(token) for token in last]
        for row in (i for i, may in enumerate(found) if may):
            text = self.codec.decode(completions[row].tolist())
            found[row] = any(string in text for string in self.strings)
        return torch.tensor(found, dtype=torch.bool, device=completions.device)

    def _may_end(self, token: int) -> bool:
        if token not in self._could_end:
            piece = self.codec.pieces([token])[0]
            # Part of a character decodes to U+FFFD; some tokenisers drop a lone token's space.
            known = any(part in piece for part in self.ends | {"\ufffd"})
            self._could_end[token] = known or " " in self.ends
        return self._could_end[token]
