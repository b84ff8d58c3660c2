"""What a trainer gets: tensors, one record for each row, and figures about all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from tensordict import TensorDict

from rollout.batch.records import Sample, find_media
from rollout.batch.storage import BatchTokenizer, read_batch, write_batch
from rollout.chat.trajectory import Trajectory
from rollout.errors import RolloutError
from rollout.media.processor import MediaProcessor  # noqa: TC001  (a Struct looks its names up)
from rollout.media.tensors import MultiModalInputs
from rollout.observe.batch_events import of_batch
from rollout.observe.event_file import EVENTS, events_of_batch
from rollout.observe.timeline import write_timeline
from rollout.types import Outcome


class RolloutBatch(msgspec.Struct, kw_only=True, eq=False):
    """B rows of training data: one for each transcript, in the order of the prompts.

    Shapes: B rows, P prompt length, R response length. In the layout "packed" the same keys are
    jagged nested tensors, each row as long as its tokens.

    Attributes:
        tensors: A TensorDict of batch size ``[B]``: ``prompts`` (B, P) int64, left-padded;
            ``responses`` (B, R) int64, right-padded; ``response_mask`` (B, R) int64, 1 exactly
            on generated ids; ``input_ids``, ``attention_mask``, ``position_ids`` (B, P+R) int64;
            ``rollout_log_probs`` (B, R) float32, 0.0 off the mask; ``weight_versions`` (B, R)
            int32, -1 off the mask; ``trainable`` (B,) bool; ``rewards`` (B,) float32, NaN where
            unknown; ``groups`` (B,) int64, the position of the row's prompt in the call; where
            engines tell them, ``routed_experts`` (B, P+R, layers, top_k) int16, -1 unknown; where
            a reward function gave any, ``token_rewards`` (B, R) float32, NaN in rows without. Of
            M-RoPE families ``position_ids`` is (B, 3, P+R), or (B, 4, P+R) with
            `media.position_rows` = 4; packed, each row is (T, 3) or (T, 4).
        samples: One record for each row.
        metrics: Figures by name; one that is unknown is absent.
        trajectories: The trajectories with their transcripts, in the order of the rows; one that
            has several rows stands here once.
        decode: Ids to text; `save` then writes the text of every span.
        events_path: Where the events of its run are written, `observe.path`; None: nowhere.
        tokenizer: Which one wrote it, written by `save` and read by `load`; None: not known.
        number: Its call's among those of the run, from 0, in these events; None: not known.
        multi_modal_inputs: Of each row a dict of the tensors that its images and videos become,
            made when it is read; see `MultiModalInputs`.
    """

    tensors: TensorDict
    samples: list[Sample]
    metrics: dict[str, float]
    trajectories: list[Trajectory] = msgspec.field(default_factory=list)
    decode: Callable[[Sequence[int]], str] | None = None
    events_path: Path | None = None
    number: int | None = None
    tokenizer: BatchTokenizer | None = None
    multi_modal_inputs: MultiModalInputs = msgspec.field(default_factory=MultiModalInputs)

    def __len__(self) -> int:
        """B, the number of rows."""
        return int(self.tensors.batch_size[0])

    def __repr__(self) -> str:
        counts = Counter(sample.outcome for sample in self.samples)
        outcomes = [f"{outcome}: {counts[outcome]}" for outcome in Outcome if counts[outcome]]
        rows = f"{len(self)} rows ({', '.join(outcomes) or 'no outcomes'})"
        shapes = [f"{key} {tuple(value.shape)}" for key, value in self.tensors.items()]
        return f"<RolloutBatch of {rows}; {', '.join(shapes[:2])}, …>"

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write the batch to a directory that holds no other one; blocks while it writes.

        The files are written beside their places first and renamed, ``meta.json`` with the others'
        checksums last: a save that is cut short leaves the earlier batch or a directory that `load`
        refuses, never a mixture. ``docs/batch.md`` names them.

        Values of `extra` and prompts become what JSON makes of them (a tuple a list, an array
        nested lists); one that JSON cannot hold becomes its ``repr`` and logged.

        Args:
            directory: Made where it is not there; may hold other files.
            overwrite: Replace the files of a batch that is there.

        Raises:
            RolloutError: The directory holds a batch, or files of such names; an image or video has
                no content (of `load_trajectories`); or it cannot be written: names the file, and
                where room lacks, what is needed and what there is. Nothing is left of the attempt.
        """
        write_batch(Path(directory), self, overwrite=overwrite)

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        processor: MediaProcessor | None = None,
        tokenizer: str | None = None,
    ) -> RolloutBatch:
        """The batch that `save` wrote to `directory`. Never unpickles.

        Its `decode` and ``print(trajectory)`` load the tokenizer that the batch was written with
        once they need it, and say where it cannot be found: `decode` as a `RolloutError`.

        Args:
            directory: Where it is.
            processor: Of the model, for `multi_modal_inputs`.
            tokenizer: Directory or hub name, where the tokenizer is elsewhere now.

        Raises:
            RolloutError: A file is missing, damaged or not of this batch; names it and says why.
        """
        parts = read_batch(Path(directory), tokenizer)
        rows = [segment for each in parts["trajectories"] for segment in each.segments]
        media = [find_media(segment.transcript) for segment in rows]
        inputs = MultiModalInputs(media, processor)
        events = Path(directory) if Path(directory, EVENTS).exists() else None
        return cls(**parts, multi_modal_inputs=inputs, events_path=events)

    def timeline(self, path: str | Path) -> None:
        """Write where its time went as a Chrome trace, for Perfetto, Chrome or speedscope.

        A lane for each replica, each trajectory and the event loop, and flows from turns to their
        requests; see ``docs/observe.md``. Blocks while it reads and writes.

        Raises:
            RolloutError: No events were written (`observe.path` is not set), or a file cannot be
                read or written.
        """
        if self.events_path is None:
            raise RolloutError("timeline: the run's events are not written; set observe.path")
        rows = {(t.uid, t.member, str(t.outcome), t.num_turns) for t in self.trajectories}
        events = events_of_batch(self.events_path, self.number)
        write_timeline(of_batch(events, self.number, rows), path)
