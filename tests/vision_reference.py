"""What transformers says of prompts with images and videos, for engines to be compared with."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest

from vision_models import picture, png

pytest.importorskip("torchvision", reason="processors of transformers for videos need it")

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from rollout.media import Media, decode
from rollout.media.processor import MediaProcessor


def image(number: int, width: int = 80, height: int = 60) -> Media:
    content = png(number, width, height)
    return Media(kind="image", content=content, mime="image/png", width=width, height=height)


def video(number: int, frames: int = 6, width: int = 64, height: int = 48) -> Media:
    from rollout.media.video import pack_frames
    from rollout.medium import FRAMES_MIME

    pixels = np.stack([np.asarray(picture(number * 100 + n, width, height)) for n in range(frames)])
    return Media(
        kind="video",
        content=pack_frames(pixels),
        mime=FRAMES_MIME,
        width=width,
        height=height,
        indices=tuple(range(frames)),
        total_frames=frames,
        fps=4.0,
    )


class Reference:
    """What the model's own processor and `generate` of transformers say."""

    def __init__(self, directory: str) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        self.processor = AutoProcessor.from_pretrained(directory)

    def inputs(self, *parts: str | Media) -> dict[str, torch.Tensor]:
        """One user's message of texts and media, rendered and read in one call."""
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}
            for part in parts
        ]
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        media = [part for part in parts if isinstance(part, Media)]
        from PIL import Image

        given: dict[str, Any] = {}
        images = [Image.fromarray(decode(each)) for each in media if each.kind == "image"]
        videos = [each for each in media if each.kind == "video"]
        if images:
            given["images"] = [images]
        if videos:
            given["videos"] = [decode(each) for each in videos]
            given["video_metadata"] = [
                {
                    "total_num_frames": v.total_frames,
                    "fps": v.fps,
                    "frames_indices": list(v.indices),
                }
                for v in videos
            ]
            given["do_sample_frames"] = False
        return dict(self.processor(text=[text], return_tensors="pt", **given))

    def greedy(self, inputs: dict[str, torch.Tensor], count: int) -> list[int]:
        length = inputs["input_ids"].shape[1]
        tokens = self.model.generate(
            **copy.deepcopy(inputs), max_new_tokens=count, do_sample=False, eos_token_id=[]
        )
        return tokens[0, length:].tolist()

    def ratios(self, inputs: dict[str, torch.Tensor], media: Any, answer: Any) -> np.ndarray:
        """Of the probabilities that were answered, to those of a plain forward pass over the row.

        Random weights may sample a placeholder, which no forward pass takes: it ends before.
        """
        reader = MediaProcessor(self.processor, self.model.config)
        placeholders = set(reader.placeholder_ids.values())
        ids = list(itertools.takewhile(lambda token: token not in placeholders, answer.ids))
        prompt = inputs["input_ids"][0].tolist()
        row = np.array(prompt + ids)
        positions = reader.position_ids(row, reader.places(prompt, media))
        plain = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
        plain.pop("mm_token_type_ids", None)
        with torch.inference_mode():
            where = torch.from_numpy(positions)
            logits = self.model(
                input_ids=torch.from_numpy(row)[None],
                attention_mask=torch.ones((1, len(row)), dtype=torch.int64),
                position_ids=where[:, None] if len(where) == 3 else where,
                **plain,
            ).logits[0]
        scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        wanted = scores[torch.arange(len(ids)), torch.tensor(ids, dtype=torch.int64)].numpy()
        return np.exp(np.array(answer.log_probs[: len(ids)]) - wanted)
