"""The run as Markdown: tables with the targets beside the ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.engines.figures import Figures
from benchmarks.engines.run import LLAMA_CPP, OURS, VLLM, Run
from benchmarks.engines.spread import Spread
from benchmarks.engines.workload import STEP_BATCH, Workload

MIN_ROUNDS = 3
_MISSING = "-"
_DECODE_TARGETS = {1: 1.1, 8: 1.5, 32: 1.5}
_LLAMA_CPP_PREFILL, _VLLM_PREFILL = 2.5, 1.3
_GEMM_SHARE, _GEMM_SHARE_FROM = 0.65, 512
_CONTEXT_COST = 1.5


def make_report(run: Run, workload: Workload) -> str:
    """All of it, with a line at its end."""
    parts = [_head(run, workload), _decode(run, workload), _prefill(run, workload), _steps(run, workload), _memory(run)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(run: Run, workload: Workload) -> str:
    lines = [
        "# Our engine beside its peers",
        "",
        f"- commit: {run.commit}",
        f"- machine: {run.machine}",
        f"- command: `{run.command}`",
        f"- model: {run.model}; {workload.num_threads} threads, each arm on the same cores",
    ]
    setups = {turn.arm: turn.figures.setup for turn in run.turns}
    lines += [f"- {arm}: {setups[arm]}" for arm in run.arms if arm in setups]
    reads = Spread.of(limits.read_bytes_per_s / 1e9 for limits in run.limits)
    gemms = Spread.of(limits.gemm_flops_per_s / 1e9 for limits in run.limits)
    if reads is not None and gemms is not None:
        lines.append(
            f"- limits of the machine, same threads: {reads.text(1)} GB/s read from memory, {gemms.text()} GFLOP/s in bfloat16 "
            "matrix products of 512 rows"
        )
    lines += [f"- {note}" for note in run.notes]
    if len(run.limits) < MIN_ROUNDS:
        lines.append(f"- a trial: a result takes at least {MIN_ROUNDS} rounds, and this has {len(run.limits)}")
    explanation = f"Median (lowest-highest) of {len(run.limits)} rounds. Ratios are taken within a round; a mark says whether "
    lines += ["", explanation + "their median meets the target."]
    return "\n".join(lines)


def _decode(run: Run, workload: Workload) -> str:
    if not workload.batches:
        return ""
    rows = []
    for batch in workload.batches:
        ratio = run.ratio((LLAMA_CPP, VLLM), _decode_at(batch))
        cells = [_text(run.spread(arm, _decode_at(batch))) for arm in run.arms]
        rows.append([str(batch), *cells, _text(ratio, 2), _at_least(ratio, _DECODE_TARGETS.get(batch), "{:g}x")])
    span = f"{workload.num_steps} steps from {workload.context} tokens of context on"
    title = f"## Decode, tokens a second\n\nBy sequences at once, over {span}, prefill not in it.\n\n"
    head = ["batch", *run.arms, "ours / better of llama.cpp and vLLM-CPU", "target"]
    return title + _table(head, rows)


def _prefill(run: Run, workload: Workload) -> str:
    if not workload.lengths:
        return ""
    rows = []
    for length in workload.lengths:
        measure = _prefill_at(length)
        over_llama_cpp, over_vllm = run.ratio((LLAMA_CPP,), measure), run.ratio((VLLM,), measure)
        share = run.gemm_share(length)
        rows.append(
            [
                str(length),
                *[_text(run.spread(arm, measure)) for arm in run.arms],
                f"{_text(over_llama_cpp, 2)} {_at_least(over_llama_cpp, _LLAMA_CPP_PREFILL, '')}".strip(),
                f"{_text(over_vllm, 2)} {_at_least(over_vllm, _VLLM_PREFILL, '')}".strip(),
                f"{_text(share, 2)} {_at_least(share, _GEMM_SHARE if length >= _GEMM_SHARE_FROM else None, '')}".strip(),
            ]
        )
    head = [
        "prompt",
        *run.arms,
        f"ours / llama.cpp (target {_LLAMA_CPP_PREFILL:g}x)",
        f"ours / vLLM-CPU (target {_VLLM_PREFILL:g}x)",
        f"ours / peak of matrix products (target {_GEMM_SHARE:g} from {_GEMM_SHARE_FROM} on)",
    ]
    return "## Prefill, tokens a second\n\nOne prompt, to its first token.\n\n" + _table(head, rows)


def _steps(run: Run, workload: Workload) -> str:
    if not workload.contexts:
        return ""
    arms = [arm for arm in run.arms if any(run.spread(arm, _step_at(context)) for context in workload.contexts)]
    rows = [[str(context), *[_text(run.spread(arm, _step_at(context)), 1) for arm in arms]] for context in workload.contexts]
    shortest, longest = workload.contexts[0], workload.contexts[-1]
    costs = {arm: run.context_cost(arm, shortest, longest) for arm in arms} if shortest < longest else {}
    if costs:
        rows.append(["growth / time to read its keys and values", *[_text(cost, 2) for cost in costs.values()]])
    num_bytes = STEP_BATCH * (longest - shortest) * run.size.kv_bytes_per_token
    title = (
        f"## Step time by context, milliseconds\n\n{STEP_BATCH} sequences, {workload.num_context_steps} steps at each context."
    )
    if costs:
        title += (
            f" From {shortest} to {longest} tokens there are {num_bytes / 1e6:.0f} MB more of keys and values to read, in our"
        )
        title += (
            f" cache's type; target for ours: at most {_CONTEXT_COST:g} times as long as that takes{_at_most(costs.get(OURS))}."
        )
    return title + "\n\n" + _table(["context", *arms], rows)


def _memory(run: Run) -> str:
    cells = [_text(run.spread(arm, lambda figures: figures.peak_memory_bytes / 2**20)) for arm in run.arms]
    same = [f"{arm} {count} of {length}" for arm, count, length in _equal_tokens(run)]
    text = (
        "## Memory, MiB\n\nPeak resident memory over the whole workload, all processes of an arm together. Each has a cache for"
    )
    text += " the largest part of the workload; ours holds the weights in the forms of both phases.\n\n"
    text += _table(list(run.arms), [cells])
    if same:
        text += "\n\nGreedy tokens after a fixed prompt that equal ours before the first difference: " + ", ".join(same) + "."
    return text


def _equal_tokens(run: Run) -> list[tuple[str, int, int]]:
    """Arm, tokens in common, tokens compared."""
    tokens = {turn.arm: turn.figures.token_ids for turn in run.turns}
    ours = tokens.pop(OURS, ())
    counts = []
    for arm, theirs in tokens.items() if ours else ():
        pairs = list(zip(ours, theirs, strict=False))
        num_equal = next((index for index, (own, other) in enumerate(pairs) if own != other), len(pairs))
        counts.append((arm, num_equal, len(pairs)))
    return counts


def _decode_at(batch: int) -> Callable[[Figures], float | None]:
    return lambda figures: figures.decode_tokens_per_s(batch)


def _prefill_at(length: int) -> Callable[[Figures], float | None]:
    return lambda figures: figures.prefill_tokens_per_s(length)


def _step_at(context: int) -> Callable[[Figures], float | None]:
    def milliseconds(figures: Figures) -> float | None:
        seconds = figures.step_s(context)
        return None if seconds is None else 1e3 * seconds

    return milliseconds


def _text(spread: Spread | None, digits: int = 0) -> str:
    return _MISSING if spread is None else spread.text(digits)


def _at_least(spread: Spread | None, target: float | None, text: str) -> str:
    """The target, as ``text`` formats it, and whether it is met; empty without a target."""
    if target is None:
        return ""
    mark = "" if spread is None else "✓" if spread.median >= target else "✗"
    return f"{text.format(target)} {mark}".strip()


def _at_most(cost: Spread | None) -> str:
    return "" if cost is None else " ✓" if cost.median <= _CONTEXT_COST else " ✗"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
