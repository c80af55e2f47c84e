# pyright: basic, reportMissingImports=false
"""A vLLM weight-transfer engine over a weight store. It runs in vLLM's workers, which have vLLM and torch.

A request carries a root, never weights. The version is fetched and verified in separate memory; only then does vLLM's own loader write it
into the model, part by part. If the loader fails, the weights that were served before are restored.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from ostinato.core.errors import BadConfig, BadRequest, BadWeights, Conflict, NotFound
from ostinato.core.weights import WeightArray, Weights
from ostinato.weights.config import BucketConfig
from ostinato.weights.follow.staging import Staging, changed_parts
from ostinato.weights.store.factory import open_url
from ostinato.weights.version.content import check_ref

logger = logging.getLogger("vllm.ostinato")  # vLLM only prints logs below its own name

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_TIED = "lm_head.weight"  # a checkpoint may hold it although the model ties it to the embedding
Module = torch.nn.Module


@dataclass
class StoreInfo(WeightTransferInitInfo):
    """The weight store: a directory on this host or a bucket's URL, and obstore's settings for it.

    Credentials come from the server's environment.
    """

    url: str
    options: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "://" not in self.url and not Path(self.url).is_dir():
            raise BadConfig(
                f"url: there is no directory {self.url!r} on this host; name the store as this host sees it"
            )


@dataclass
class VersionInfo(WeightTransferUpdateInfo):
    """The version to load, given either by its root or by a ref that points to it."""

    root: str | None = None
    ref: str | None = None

    def __post_init__(self) -> None:
        if (self.root is None) is (self.ref is None):
            raise BadRequest("update_info: give either root or ref", field="update_info")


class StoreEngine(WeightTransferEngine[StoreInfo, VersionInfo]):
    """Loads versions of a weight store into this worker's model."""

    init_info_cls = StoreInfo
    update_info_cls = VersionInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._store: StoreInfo | None = None
        self._staging: Staging | None = None
        self._served: tuple[str, Weights] | None = None  # None: the weights that the server was started with
        self._received = False
        self._broken = ""
        self._aliases = _aliases(model)
        self._form: Mapping[str, tuple[int, ...]] = {}

    # ------------------------------------------------------------ vLLM's protocol

    def init_transfer_engine(self, init_info: StoreInfo) -> None:
        """Open the store. Opening the same store again keeps the fetched versions."""
        if init_info == self._store:
            return
        self.shutdown()
        self._form = self._form or _checkpoint_form(self.model_config)
        store = open_url(BucketConfig(url=init_info.url, options=init_info.options))
        self._staging, self._store = Staging(store, self._check), init_info

    def start_weight_update(self) -> None:
        """Begin an update. The model is not touched before a version is verified."""
        self._received = False

    def receive_weights(self, update_info: VersionInfo) -> None:
        """Load the version, which is fetched now if it was not staged. Raises like `Staging.take`, with the model unchanged."""
        root = update_info.root or self._resolve(str(update_info.ref))
        weights = self._require().take(root)
        self._install(root, weights)
        self._received = True

    def finish_weight_update(self) -> None:
        """End an update. Raises Conflict if no version was loaded, because vLLM would give the old weights a new name."""
        if not self._received:
            raise Conflict("finish_weight_update: no version was loaded since start_weight_update")
        self._received = False

    def shutdown(self) -> None:
        """End the fetching thread."""
        if self._staging is not None:
            self._staging.close()
        self._staging = self._store = None

    # ------------------------------------------------------------ called by the worker extension

    def stage(self, root: str) -> dict[str, Any]:
        """Start to fetch and verify a version while serving. Returns `status()`."""
        self._require().stage(root)
        return self.status()

    def status(self) -> dict[str, Any]:
        """Return the staged version's fields (see `Staged`), `served` ("" before the first version) and `broken`."""
        staged = asdict(self._staging.status()) if self._staging is not None else {"state": "nothing"}
        return {**staged, "served": self._served[0] if self._served else "", "broken": self._broken}

    # ------------------------------------------------------------ internals

    def _require(self) -> Staging:
        if self._broken:
            raise Conflict(self._broken)
        if self._staging is None:
            raise Conflict("no store is open: POST /init_weight_transfer_engine first")
        return self._staging

    def _resolve(self, ref: str) -> str:
        if self.parallel_config.world_size_across_dp > 1:
            raise BadRequest(
                "update_info: with several workers give the root: a ref may move between them", field="ref"
            )
        root = self._require().resolve(check_ref(ref))
        if root is None:
            raise NotFound(f"there is no ref {ref} in the weight store", field="ref")
        return root

    def _check(self, weights: Weights) -> None:
        """Raise BadWeights for weights of another model, which would leave gaps in fused parameters."""
        form = {name: array.shape for name, array in weights.items()}
        tied = {_TIED} if getattr(self.model_config.hf_config, "tie_word_embeddings", False) else set[str]()
        missing, extra = sorted(self._form.keys() - form.keys() - tied), sorted(form.keys() - self._form.keys())
        if missing or extra:
            raise BadWeights(
                f"the version is not of this model: missing {missing[:3]} of {len(missing)}, extra {extra[:3]} of {len(extra)}"
            )
        for name, shape in form.items():
            if shape != self._form[name]:
                raise BadWeights(f"tensor {name!r} has shape {shape}; the server's model has {self._form[name]}")
            if weights[name].dtype not in DTYPES:
                raise BadWeights(f"tensor {name!r} has dtype {weights[name].dtype}, which vLLM cannot load")
        for group in self._aliases:
            held = [weights[name].data for name in group if name in weights]
            if not all(np.array_equal(held[0], other) for other in held[1:]):
                raise BadWeights(
                    f"{' and '.join(group)} differ, but vLLM holds them as one: restart it on this version"
                )

    def _install(self, root: str, weights: Weights) -> None:
        parts = changed_parts(self._served[1] if self._served else None, weights)
        names = [name for part in parts.values() for name in part]
        try:
            self._load(self._modules(parts), _tensors(weights, names))
        except BaseException as error:
            self._roll_back(root, error)
            raise
        self._served = (root, weights)
        logger.info("weights %s: %d of %d tensors loaded", root[:12], len(names), len(weights))

    def _modules(self, parts: Iterable[str]) -> list[Module]:
        """Return the modules of the parts, or the whole model if vLLM names any of them differently."""
        try:
            return [self.model.get_submodule(part) for part in parts]
        except AttributeError:
            return [self.model]

    def _load(self, modules: Sequence[Module], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Run vLLM's own layer-wise reload: each layer is loaded, processed (packed, quantised) and copied over the tensors in use."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        for module in modules:
            initialize_layerwise_reload(module)
        try:
            with disable_mtp_completeness_check():
                loaded = set(self.model.load_weights(tensors) or ())
        finally:
            for module in modules:
                finalize_layerwise_reload(module, self.model_config)
        self._process_tied(loaded)

    def _process_tied(self, loaded: Set[str]) -> None:
        """Process a tied LM head, which got its values through the embedding: on CPUs its matrix product uses a packed copy."""
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        for group in self._aliases:
            for name in group if not loaded.isdisjoint(group) else ():
                if name in loaded:
                    continue
                module = self.model.get_submodule(name.rpartition(".")[0])
                method: Any = getattr(module, "quant_method", None)
                if isinstance(method, UnquantizedEmbeddingMethod):
                    method.process_weights_after_loading(module)

    def _roll_back(self, root: str, error: BaseException) -> None:
        """Restore what was served before: the last version, or the files that the server was started with."""
        from vllm.model_executor.model_loader import get_model_loader

        logger.error("weights %s: vLLM's loader failed (%s); the weights served before are restored", root[:12], error)
        try:
            if self._served is not None:
                before = _tensors(self._served[1], self._served[1])
            else:
                loader = get_model_loader(self.vllm_config.load_config)
                before = loader.get_all_weights(self.model_config, self.model)
            self._load([self.model], before)
        except BaseException as second:
            self._broken = (
                f"neither {root} nor the weights served before could be loaded ({second}): restart this server"
            )
            raise


def _tensors(weights: Weights, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        yield name, _tensor(weights[name])


def _tensor(array: WeightArray) -> torch.Tensor:
    """Return a tensor over the array's own memory, which vLLM's loaders only read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that it has no read-only tensors
        return torch.from_numpy(array.data).view(DTYPES[array.dtype]).reshape(array.shape)


def _aliases(model: Module) -> list[list[str]]:
    """Return groups of names that refer to the same parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _checkpoint_form(model_config: Any) -> dict[str, tuple[int, ...]]:
    """Return {tensor name: shape} from the headers of the safetensors files that the server was started with. Raises BadConfig."""
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    path = Path(model_config.model)
    if not path.is_dir():
        path = Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))
    form: dict[str, tuple[int, ...]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            form |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    if not form:
        raise BadConfig(f"{path} holds no safetensors files; start vLLM on a model directory that does")
    return form
