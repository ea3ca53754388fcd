"""The rule for the setting `quantization`: which linear layers are kept in 8 or 4 bits.

    setting   stored in a GGUF type of 4 to 8 bits          stored in float8        stored otherwise
    none      floats                                        floats                  floats
    auto      as stored; floats in torch's operations and   as stored where the     floats
              where float32 was asked for by name           GPU multiplies it
    int8      as stored                                     8 bits                  8 bits
    int4      as stored if that is 4 bits, else 4 bits      4 bits                  4 bits
    fp8       float8                                        as stored               float8

Under int4 the head gets 8 bits; under fp8, which rounds to 4 bits of mantissa, it stays in floats. Floats stay where
rows are not whole groups of 32 (float8: rows and columns no multiples of 16) and where one part of a fused layer has to
stay. Float8 is kept as stored where each row has one scale. Norms are always floats, and embedding tables unless they
are the tied head (`Ops.embeds_from_head`).
"""

from dataclasses import dataclass
from typing import Literal

import torch

from configs.errors import SettingsError
from engine.checkpoints import Checkpoint, StoredTensor
from engine.kernels.ops import Ops
from engine.kernels.quantised import GROUP_SIZE

from .mapping import Module, modules

BITS = {"int8": 8, "int4": 4, "Q8_0": 8, "Q6_K": 8, "Q5_K": 8, "Q5_1": 8, "Q5_0": 8, "Q4_K": 4, "Q4_1": 4, "Q4_0": 4}
"""Forms of a quantised weight: int8 and int4 are made here, the others are GGUF's -> bits of q."""

STORED_FLOAT8, ROUNDED_FLOAT8 = "F8_E4M3", "fp8"
"""Forms of a float8 weight: stored so, and made here."""

FLOAT8_MULTIPLE = 16
"""Of rows and columns: what torch's product takes."""

FLOAT8_CAPABILITY = (8, 9)
"""First compute capability that multiplies float8."""

Setting = Literal["auto", "none", "int8", "int4", "fp8"]


@dataclass(frozen=True)
class Precision:
    """The setting, once dtype and machine are known."""

    setting: Setting
    keeps_float8: bool = False
    """Whether float8 layers can be kept and multiplied as they are stored."""

    def forms(self, checkpoint: Checkpoint, module: Module) -> list[str] | None:
        """The form of each stored part of a linear module; None: floats."""
        parts = [checkpoint.tensors[f"{name}.weight"] for name in module.stored]
        is_head = module.field == "head"
        forms = self._float8_forms(parts, is_head=is_head) or [self._form(part, is_head=is_head) for part in parts]
        quantised = [form for form in forms if form is not None]
        return quantised if len(quantised) == len(forms) else None

    def _float8_forms(self, parts: list[StoredTensor], *, is_head: bool) -> list[str | None] | None:
        """None: float8 is not for this layer."""
        is_stored = self.keeps_float8 and all(has_row_scales(part) for part in parts)
        is_rounded = self.setting == "fp8" and not is_head
        if not (is_rounded or (is_stored and self.setting in ("auto", "fp8"))):
            return None
        if sum(part.shape[0] for part in parts) % FLOAT8_MULTIPLE or parts[0].shape[1] % FLOAT8_MULTIPLE:
            return None
        return [STORED_FLOAT8 if is_stored else ROUNDED_FLOAT8] * len(parts)

    def _form(self, stored: StoredTensor, *, is_head: bool) -> str | None:
        own = stored.dtype if stored.dtype in BITS else None
        if self.setting in ("none", "fp8") or stored.shape[-1] % GROUP_SIZE:
            return None
        if self.setting == "auto":
            return own
        wanted = "int8" if is_head else self.setting
        return own if own and BITS[own] <= BITS[wanted] else wanted

    def describe(self, checkpoint: Checkpoint) -> str:
        """`none`, `int4`, `gguf (Q4_1, Q8_0)`, `gguf (Q4_K), int4`, `fp8 as stored`; and in how many layers, where not
        in all.
        """
        linears = [self.forms(checkpoint, module) for module in modules(checkpoint.config) if module.is_linear]
        names = sorted({form for forms in linears for form in forms or []})
        stored = ", ".join(name for name in names if name.startswith("Q"))
        if STORED_FLOAT8 in names:
            names = ["fp8" if ROUNDED_FLOAT8 in names else "fp8 as stored"]
        made = min((name for name in names if not name.startswith("Q")), default="")  # int4 implies an int8 head
        count = sum(forms is not None for forms in linears)
        if not count:
            return "none"
        text = ", ".join(filter(None, (f"gguf ({stored})" if stored else "", made)))
        return text if count == len(linears) else f"{text} in {count} of {len(linears)} linear layers"


FLOATS = Precision("none")


def has_row_scales(stored: StoredTensor) -> bool:
    """Whether it is stored in float8 with one scale for each row, or one for all."""
    return stored.scale is not None and stored.scale.block in (stored.shape, (1, stored.shape[1]))


def select_precision(
    setting: Setting, ops: Ops, dtype: torch.dtype, capability: tuple[int, int] = (0, 0), *, is_exact: bool = False
) -> tuple[Precision, list[str]]:
    """What `setting` means for these operations, and notes for the start-up message.

    `capability` is the GPU's; (0, 0) for a CPU. `is_exact`: float32 was asked for by name. Raises SettingsError for fp8
    where it cannot be multiplied.
    """
    keeps_float8 = ops.packs_float8 and capability >= FLOAT8_CAPABILITY
    if setting == "fp8" and not keeps_float8:
        raise SettingsError(f"quantization fp8 {_missing(capability)}: take int8 or int4")
    if setting == "auto" and (is_exact or not ops.packs_quantised):
        return FLOATS, []
    if setting in ("int8", "int4") and not ops.packs_quantised:
        name = str(dtype).removeprefix("torch.")
        return Precision(setting), [f"quantization {setting}: torch's operations keep the rounded weights in {name}"]
    return Precision(setting, keeps_float8), []


def _missing(capability: tuple[int, int]) -> str:
    if capability >= FLOAT8_CAPABILITY:
        return "needs the Triton kernels, which are not in use"
    found = "this one has {}.{}".format(*capability) if capability > (0, 0) else "this is a CPU"
    return f"needs a GPU of compute capability 8.9 or newer (Ada, Hopper); {found}"
