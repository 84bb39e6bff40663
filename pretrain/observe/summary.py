"""What a run ends with, for people and as JSON."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ckpt import committed_steps, open_store
from ckpt.format import manifest_key
from parallel.layout import count_ranks
from pretrain.observe.console import human_bytes, say
from pretrain.observe.events import LedgerSummed
from pretrain.observe.ledger import ledger_table
from pretrain.spec import JobSpec, is_learning_rate_jump, learning_rate

_SHADES = " .:-=+*#%@"


class Summary(BaseModel):
    """``RUN_DIR/summary.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # runs of before have more fields

    val_bits_per_byte: float
    train_loss_first: float | None
    train_loss_last: float | None
    tokens_per_second: float
    peak_memory_bytes: int
    """Of the rank that had most."""
    steps: int
    tokens: int
    world_size: int
    layout: str
    checkpoint: str
    spec_hash: str
    moe_layers: list[int]
    tokens_per_expert: list[list[int]]
    """Assignments in the held-out sequences, padding included, a row for each of moe_layers."""
    sample: str
    val_bits_per_byte_by_set: dict[str, float] = {}
    """Of each source and validation set, where there are several."""
    ledger: LedgerSummed | None = None
    """The goodput ledger when the summary was made."""

    @staticmethod
    def read(path: Path) -> Summary | None:
        """The summary at ``path``; None where the file is missing or has another form."""
        try:
            return Summary.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None


def heat_map(layers: list[int], rows: list[list[int]]) -> str:
    """Expert loads as text: a line for each layer, two characters for each expert.

    Args:
        layers: numbers of the MoE layers.
        rows: for each layer the assignments of each expert.
    """
    lines = [f"expert load, '{_SHADES[0]}' none to '{_SHADES[-1]}' twice the mean or more:"]
    for layer, counts in zip(layers, rows, strict=True):
        mean = max(sum(counts) / len(counts), 1e-9)
        top = len(_SHADES) - 1
        cells = "".join(_SHADES[min(top, round(count / mean * top / 2))] * 2 for count in counts)
        lines.append(
            f"  layer {layer:>3} |{cells}| max/mean {max(counts) / mean:.2f}, "
            f"unused {counts.count(0)}"
        )
    return "\n".join(lines)


def show_summary(summary: Summary, spec: JobSpec) -> None:
    """Print a summary, and commands that a person may want next."""
    s = summary
    where = count_ranks(s.world_size)
    if s.world_size > 1:
        where += f" ({s.layout})"
    first, last = s.train_loss_first or 0.0, s.train_loss_last or 0.0
    say(
        f"\n{spec.name}: {s.steps} steps, {s.tokens:,} tokens "
        f"on {where}"
        f"\n  validation        {s.val_bits_per_byte:.3f} bits per byte of held-out text"
        + "".join(
            f"\n    {name:<15} {each:.3f}" for name, each in s.val_bits_per_byte_by_set.items()
        )
        + f"\n  training loss     {first:.3f} -> {last:.3f} nats per token"
        f"\n  speed             {s.tokens_per_second:,.0f} tokens/s"
        f"\n  peak memory       {human_bytes(s.peak_memory_bytes)} on one rank"
    )
    if s.ledger is not None:
        say(_indent(ledger_table(s.ledger), "  "))
    if s.tokens_per_expert:
        say(heat_map(s.moe_layers, s.tokens_per_expert))
    if s.sample:
        say(f"\nsample, from {spec.sample.prompt!r}:\n{_indent(s.sample, '  | ')}")
    root = spec.checkpoint_path
    if isinstance(root, Path):
        root = root.resolve()  # the commands below work from any folder
    say(
        f"\ncheckpoint  {open_store(root).where(manifest_key(s.steps))}"
        f"\n  inspect   convoy inspect verify {root}"
    )
    say(f"  report    convoy report {spec.run_path.resolve()}")
    if s.world_size > 1:
        say(f"  reshard   convoy reshard {root} {root}-ep1 --layout ep=1")
    say(f"  train on  {how_to_train_on(spec, s.steps, root)}")


def how_to_train_on(spec: JobSpec, step: int, root: Path | str) -> str:
    """What a person can do to train longer than to the last step of a run.

    More steps stretch a schedule: the learning rate at ``step`` may then be a multiple of what it
    was. Where it is not, the run can be resumed. Otherwise a checkpoint of before the decay of
    ``wsd`` is named, or a new run that begins with these weights.

    Args:
        spec: of the run.
        step: the last step.
        root: the run's checkpoints.
    """
    if spec.tune is not None and spec.tune.lora is not None:
        return f"convoy convert export {root} HF_DIR writes the weights with their adapters"
    more = f"--set train.steps={2 * step}"
    before, longer = learning_rate(spec, step), learning_rate(spec, step, 2 * step)
    if not is_learning_rate_jump(before, longer):
        return f"the same command with {more}"
    if spec.schedule.kind == "wsd":
        undecayed = [s for s in committed_steps(root) if s <= step - spec.schedule.decay_steps]
        if undecayed:
            return (
                f"convoy prepare SPEC --load-step {undecayed[-1]} goes back to before the decay of "
                f"the learning rate; then the same command with {more}"
            )
    places = f"--set run_dir={spec.run_path}-2"
    if spec.checkpoint.path is not None:
        places += f" --set checkpoint.path={spec.checkpoint_path}-2"
    return (
        f"the same command with --set init.checkpoint={root} {places} starts a new run from these "
        f"weights (more steps of this run would raise its learning rate from {before:.1e} to "
        f"{longer:.1e})"
    )


def _indent(text: str, margin: str) -> str:
    return "\n".join(f"{margin}{line}" for line in text.splitlines())
