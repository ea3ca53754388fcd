"""What a run of the check is about."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    is_dry: bool = False
    """Tiny shapes on the CPU."""
    backend: str = ""
    """The attention backend that is checked, a name or `module:Class`; "": all."""
    start: str = "fork"
    """How the processes of sections begin: fork or spawn."""

    @property
    def device(self) -> str:
        return "cpu" if self.is_dry else "cuda"

    @property
    def environment(self) -> dict[str, str]:
        """Variables to be set before torch and triton are imported; the last keeps torch from touching the device when
        it is asked whether there is one."""
        common = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        common["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        return common | ({"TRITON_INTERPRET": "1"} if self.is_dry else {})
