"""Loading the processor of a vision-language target, with torchvision or without.

The processor classes of transformers also ask for a video processor, and that needs torchvision; most families read
images without it. What cannot be loaded is left out here, as long as text and images can be read.
"""

import os
from pathlib import Path
from typing import Any, cast

import transformers
from transformers import (
    PROCESSOR_MAPPING,
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    AutoVideoProcessor,
    BaseImageProcessor,
    ProcessorMixin,
)
from transformers.models.auto.processing_auto import processor_class_from_name

_PART_LOADERS: dict[str, Any] = {
    "tokenizer": AutoTokenizer,
    "image_processor": AutoImageProcessor,
    "video_processor": AutoVideoProcessor,
    "feature_extractor": AutoFeatureExtractor,
}
_REQUIRED_PARTS = ("tokenizer", "image_processor")


def load_processor(name: str, trust_remote_code: bool = False) -> ProcessorMixin:
    """Load a processor. Without torchvision it reads images with PIL, and no video: see `has_video_processor`.

    Args:
        name: Folder or hub id.
        trust_remote_code: Whether Python code found there may run.

    Raises:
        ValueError: Nothing usable is there, or it needs torchvision; one line.
    """
    path = os.path.expanduser(name)
    if name.startswith((".", "/", "~")) and not Path(path).is_dir():
        raise ValueError(f"processor {name!r}: no such folder")
    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever the parts raise: ImportError, OSError, ValueError, TypeError, ...
        class_name = _class_name(path, trust_remote_code)
        if class_name is None:
            raise ValueError(f"processor {name!r}: {_first_line(error)}") from error
        try:
            return _load_parts(class_name, path, trust_remote_code)
        except Exception as second:
            raise ValueError(
                f"processor {name!r}: {class_name} cannot be loaded, perhaps for want of torchvision "
                f"(pip install torchvision): {_first_line(second)}"
            ) from second
    if not isinstance(processor, ProcessorMixin):
        raise ValueError(
            f"processor {name!r}: expected one for text and images, got {type(processor).__name__}, for one of them"
        )
    return processor


def has_video_processor(processor: ProcessorMixin) -> bool:
    """Whether the processor can read videos, for which transformers needs torchvision."""
    return getattr(processor, "video_processor", None) is not None


def processor_of_parts(family: type[ProcessorMixin], settings: dict[str, Any], **parts: Any) -> ProcessorMixin:
    """Build a processor of the class `family` from the parts there are, where that class would insist on all.

    Args:
        family: A processor class of transformers.
        settings: Its other arguments, such as chat_template, as its `get_processor_dict` returns them.
        parts: The tokenizer, the image processor, ... by the names that the class gives them.
    """
    partial = _partial_class(family, tuple(parts))
    missing = dict.fromkeys(name for name in family.get_attributes() if name not in parts)
    return cast(ProcessorMixin, partial.from_args_and_dict([], settings, **parts, **missing))


class _Partial(ProcessorMixin):
    """Stands between a processor class and the base that insists on every part: takes out those that are None."""

    family: type[ProcessorMixin]
    present: tuple[str, ...]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(self.family.get_attributes(), args, strict=False)) | kwargs
        super().__init__(**{name: part for name, part in given.items() if part is not None})  # type: ignore[no-untyped-call]

    @classmethod
    def get_attributes(cls) -> list[str]:
        """The names of the parts, in the order of the family's class."""
        return [name for name in cls.family.get_attributes() if name in cls.present]

    def __reduce__(self) -> tuple[Any, ...]:  # the class is made on the fly, so pickle would not find it by its name
        return _empty_processor, (self.family, self.present), vars(self)


def _partial_class(family: type[ProcessorMixin], present: tuple[str, ...]) -> type[_Partial]:
    """A subclass of `family` with the same name, which is what `save_pretrained` writes."""
    namespace = {"family": family, "present": present, "get_attributes": _Partial.__dict__["get_attributes"]}
    return cast(type[_Partial], type(family.__name__, (family, _Partial), namespace))


def _empty_processor(family: type[ProcessorMixin], present: tuple[str, ...]) -> _Partial:
    partial = _partial_class(family, present)
    return partial.__new__(partial)


def _class_name(path: str, trust_remote_code: bool) -> str | None:
    """The processor class that the files name, else the one of the model type in config.json."""
    for read in (ProcessorMixin.get_processor_dict, BaseImageProcessor.get_image_processor_dict):
        try:
            settings, _ = read(path)
        except (OSError, ValueError):
            continue
        if settings.get("processor_class") is not None:
            return str(settings["processor_class"])
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        return str(cast(Any, PROCESSOR_MAPPING[type(config)]).__name__)
    except (OSError, ValueError, KeyError, ImportError):
        return None


def _load_parts(class_name: str, path: str, trust_remote_code: bool) -> ProcessorMixin:
    family = processor_class_from_name(class_name)
    if family is None:
        raise ImportError(f"transformers {transformers.__version__} has no such class")
    settings, _ = family.get_processor_dict(path)
    parts = {}
    for name in family.get_attributes():
        try:
            parts[name] = _PART_LOADERS[name].from_pretrained(path, trust_remote_code=trust_remote_code)
        except Exception:
            if name == "image_processor" and (image_processor := _pil_image_processor(path)) is not None:
                parts[name] = image_processor
            elif name in _REQUIRED_PARTS:
                raise
    return processor_of_parts(family, settings, **parts)


def _pil_image_processor(path: str) -> BaseImageProcessor | None:
    """The image processor that the files name, in its form with PIL; None where it has none."""
    settings, _ = BaseImageProcessor.get_image_processor_dict(path)
    name = str(settings.get("image_processor_type")).removesuffix("Fast").removesuffix("Pil")
    if name == "MiniMaxM3VLImageProcessor":
        name, settings = "Qwen2VLImageProcessor", _minimax_m3_as_qwen2_vl(settings)
    elif name == "Gemma4UnifiedImageProcessor":
        name, settings = "Gemma4ImageProcessor", _gemma4_unified_as_gemma4(settings)
    family = getattr(transformers, f"{name}Pil", None)
    return None if family is None else cast(BaseImageProcessor, family.from_dict(settings))


def _minimax_m3_as_qwen2_vl(settings: dict[str, Any]) -> dict[str, Any]:
    """It cuts the same patches, by default from smaller images, which it also does for a size in another form."""
    size = settings.get("size")
    by_area = isinstance(size, dict) and size.keys() >= {"shortest_edge", "longest_edge"}
    return settings if by_area else {**settings, "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 451_584}}


def _gemma4_unified_as_gemma4(settings: dict[str, Any]) -> dict[str, Any]:
    """It puts the patches that Gemma 4 pools behind its tower together at once: larger patches, nothing to pool."""
    pooled = settings.get("pooling_kernel_size", 3)
    return {**settings, "patch_size": settings.get("patch_size", 16) * pooled, "pooling_kernel_size": 1}


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
