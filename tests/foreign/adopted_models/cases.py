"""transformers' tests of all models, for each family that ``moe.adopt`` takes.

Legend: B texts, S tokens of each.
"""

from __future__ import annotations

import os
import re
import unittest
from typing import Any

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedModel

from moe.adoption.families import ADOPTED
from moe.adoption.kinds import Family
from tests.foreign.adopted_models.adoption import adopt_all, listen
from tests.foreign.adopted_models.theirs import model_tester_mixin
from tests.support.moe_families import MORE, VOCAB, config_of

# They look for warnings in the log.
transformers.utils.logging.set_verbosity_warning()


class Tester:
    """What the tests ask for sizes, a config and inputs."""

    batch_size, seq_length, is_training = 3, 7, True

    def __init__(self, family: Family) -> None:
        self.family = family
        config = config_of(family)
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
            setattr(self, name, getattr(config, name))

    def get_config(self) -> Any:
        # Classifiers look for the end of a text by its padding.
        return config_of(self.family, pad_token_id=0, bos_token_id=1, eos_token_id=2)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ids_BS = torch.randint(3, VOCAB, (self.batch_size, self.seq_length))
        mask_BS = torch.ones_like(ids_BS)
        return self.get_config(), {"input_ids": ids_BS, "attention_mask": mask_BS}


def classes_of(family: Family) -> tuple[type[PreTrainedModel], ...]:
    """The plain model of a family, and the one that predicts tokens; or its one model."""
    kind = type(config_of(family))
    model = MORE.get(family.name, {}).get("model")
    classes = [getattr(transformers, model)] if model else []
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if kind in mapping:
            classes.append(mapping[kind])
    return tuple(dict.fromkeys(classes))


def _cases(family: Family, mixin: Any) -> type:
    classes = classes_of(family)
    adopt_all(classes)

    def set_up(self: Any) -> None:
        self.model_tester = Tester(family)

    members = {
        "all_model_classes": classes,
        "setUp": set_up,
        "test_all_params_have_gradient": False,
    }
    name = "Test" + re.sub(r"\W", "", family.name)
    return type(name, (mixin, unittest.TestCase), members | {"__module__": __name__})


_part = os.environ.get("FOREIGN_PART")
_mixin = model_tester_mixin()
listen()
for _family in ADOPTED:
    if not _part or _family.name == _part:
        _class = _cases(_family, _mixin)
        globals()[_class.__name__] = _class
del _class
