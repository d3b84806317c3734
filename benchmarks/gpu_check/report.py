"""What was checked and measured on one device, for readers and as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.gpu_check.checks import CheckResult
from benchmarks.gpu_check.speed import DecodeSpeeds, Limits, Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    device: str
    torch_version: str
    model: str
    attention: str
    page_size: int
    context: int
    checks: tuple[CheckResult, ...]
    limits: Limits
    decode: DecodeSpeeds
    prefill: tuple[Speed, ...]

    def table(self) -> str:
        """In Markdown."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.device}, torch {self.torch_version}; attention by {self.attention}, pages of {self.page_size} tokens"
        yield f"model: {self.model}"
        bandwidth, peak = self.limits.bytes_per_s / 1e9, self.limits.flops_per_s / 1e12
        yield f"measured limits: {bandwidth:.3g} GB/s, {peak:.3g} TFLOP/s in bfloat16"
        yield ""
        yield "| | | tokens/s | of the limit |"
        yield "|---|---|---|---|"
        for check in self.checks:
            yield f"| {check.name} | {check.outcome} | {check.detail} | |"
        for name, speeds in (
            ("decode", self.decode.computed),
            ("decode and sample", self.decode.sampled),
            ("decode and sample, steps ahead", self.decode.ahead),
        ):
            for speed in speeds:
                what = f"{name}, {self.context} keys each"
                yield f"| {what} | batch {speed.size} | {speed.tokens_per_s:.0f} | {speed.share:.0%} of bandwidth |"
        for speed in self.prefill:
            yield f"| prefill | {speed.size} tokens | {speed.tokens_per_s:.0f} | {speed.share:.0%} of GEMM peak |"
