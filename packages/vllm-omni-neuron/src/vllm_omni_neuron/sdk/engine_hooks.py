# SPDX-License-Identifier: Apache-2.0
"""What a pipeline class answers in the engine's process, before any worker starts. No vLLM needed to import it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from vllm_omni_neuron.sdk.checkpoint import DiffusersCheckpoint
from vllm_omni_neuron.sdk.request import RequestRules
from vllm_omni_neuron.sdk.spec import ModelSpec


class EngineHooks:
    """The class methods of a pipeline that need none of its weights: about checkpoint, configuration and requests.

    The generic checks of `check_engine_config` and `resolve_request` run before the hooks. An argument `od_config` is
    vLLM-Omni's `OmniDiffusionConfig`, `checkpoint` what `open_checkpoint` returned, `request` what `resolve_request`
    made by the model's rules.

    Attributes:
        spec: the model's.
        checkpoint_class: what a checkpoint folder is opened as: a `DiffusersCheckpoint` or the model's subclass.
    """

    spec: ClassVar[ModelSpec]
    checkpoint_class: ClassVar[type[DiffusersCheckpoint]] = DiffusersCheckpoint

    @classmethod
    def open_checkpoint(cls, od_config: Any) -> Any:
        """The checkpoint folder, unread, as `checkpoint_class`."""
        return cls.checkpoint_class(Path(str(od_config.model)))

    @classmethod
    def check_engine(cls, od_config: Any, checkpoint: Any) -> None:
        """Refuse an engine configuration or a checkpoint that cannot run; by default nothing.

        Raises:
            ModelConfigError: an unsupported setting, sizes that do not fit each other.
            CheckpointError: damaged weights.
        """

    @classmethod
    @abstractmethod
    def request_rules(cls, od_config: Any, checkpoint: Any) -> RequestRules:
        """What this model, its checkpoint and the engine say about requests: defaults, strides, settings of its own."""

    @classmethod
    def check_request(cls, request: Any, checkpoint: Any, od_config: Any) -> None:
        """Refuse a request that cannot be served, beyond what its rules say; by default nothing.

        Raises:
            RequestError: naming the setting, its value and what would be valid.
        """

    @classmethod
    def num_tokens(cls, request: Any, checkpoint: Any) -> int | None:
        """The tokens that context parallelism splits; a request with fewer than ranks is refused. None: not checked."""
        return None

    @classmethod
    def check_lora(cls, path: str, checkpoint: Any) -> None:
        """Refuse a LoRA adapter that could not be loaded, of the engine or of a request; by default nothing.

        Raises:
            ValueError: naming the file and what is wrong.
        """

    @classmethod
    def get_pre_process_func(cls, od_config: Any) -> Callable[[Any], Any]:
        """Check the engine's configuration now, and every request as it comes.

        vLLM-Omni looks for functions in the pipeline's module: name this method and the next one there.
        """
        from vllm_omni_neuron.sdk.processing import pre_process_func

        return pre_process_func(cls, od_config)

    @classmethod
    def get_post_process_func(cls, od_config: Any) -> Callable[..., Any]:
        """Turn the workers' frames or images into what the caller asked for, keeping the report beside them."""
        from vllm_omni_neuron.sdk.processing import post_process_func

        return post_process_func(cls.spec.output)
