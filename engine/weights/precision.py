"""The rule for the setting `quantization`: which linear layers are kept in 8 or 4 bits.

    setting   stored in a GGUF type of 4 to 8 bits          stored in floats, or in another GGUF type
    none      floats                                        floats
    auto      as stored; floats in float32 and in torch     floats
    int8      as stored                                     8 bits
    int4      as stored if that is 4 bits, else 4 bits      4 bits

Under int4 the head gets 8 bits. Floats stay where rows are not whole groups of 32 and where one part of a fused layer
has to stay. Norms are always floats, and embedding tables unless they are the tied head (`Ops.embeds_from_head`).
"""

from dataclasses import dataclass
from typing import Literal

import torch

from engine.checkpoints import Checkpoint, StoredTensor
from engine.kernels.ops import Ops
from engine.kernels.quantised import GROUP_SIZE

from .mapping import Module, modules

BITS = {"int8": 8, "int4": 4, "Q8_0": 8, "Q6_K": 8, "Q5_K": 8, "Q5_1": 8, "Q5_0": 8, "Q4_K": 4, "Q4_1": 4, "Q4_0": 4}
"""Forms of a quantised weight: int8 and int4 are made here, the others are GGUF's -> bits of q."""

Setting = Literal["auto", "none", "int8", "int4"]


@dataclass(frozen=True)
class Precision:
    """The setting, once dtype and machine are known."""

    setting: Setting

    def forms(self, checkpoint: Checkpoint, module: Module) -> list[str] | None:
        """The form of each stored part of a linear module; None: floats."""
        parts = [checkpoint.tensors[f"{name}.weight"] for name in module.stored]
        forms = [self._form(part, is_head=module.field == "head") for part in parts]
        quantised = [form for form in forms if form is not None]
        return quantised if len(quantised) == len(forms) else None

    def _form(self, stored: StoredTensor, *, is_head: bool) -> str | None:
        own = stored.dtype if stored.dtype in BITS else None
        if self.setting == "none" or stored.shape[-1] % GROUP_SIZE:
            return None
        if self.setting == "auto":
            return own
        wanted = "int8" if is_head else self.setting
        return own if own and BITS[own] <= BITS[wanted] else wanted

    def describe(self, checkpoint: Checkpoint) -> str:
        """`none`, `int4`, `gguf (Q4_1, Q8_0)`, `gguf (Q4_K), int4`; and in how many layers, where not in all."""
        linears = [self.forms(checkpoint, module) for module in modules(checkpoint.config) if module.is_linear]
        names = sorted({form for forms in linears for form in forms or []})
        stored = ", ".join(name for name in names if name.startswith("Q"))
        made = min((name for name in names if not name.startswith("Q")), default="")  # int4 implies an int8 head
        count = sum(forms is not None for forms in linears)
        if not count:
            return "none"
        text = ", ".join(filter(None, (f"gguf ({stored})" if stored else "", made)))
        return text if count == len(linears) else f"{text} in {count} of {len(linears)} linear layers"


FLOATS = Precision("none")


def select_precision(setting: Setting, ops: Ops, dtype: torch.dtype) -> tuple[Precision, list[str]]:
    """What `setting` means for these operations, and notes for the start-up message."""
    if setting == "auto" and (dtype == torch.float32 or not ops.packs_quantised):
        return FLOATS, []
    if setting in ("int8", "int4") and not ops.packs_quantised:
        name = str(dtype).removeprefix("torch.")
        return Precision(setting), [f"quantization {setting}: torch's operations keep the rounded weights in {name}"]
    return Precision(setting), []
