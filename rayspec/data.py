"""For Ray Data users: `build_processor(ProcessorConfig(...))(dataset)`, as in `ray.data.llm`."""

from rayspec.errors import naming_the_extra

with naming_the_extra():
    from rayspec.batch.processor import Processor, ProcessorConfig, build_processor

__all__ = ["Processor", "ProcessorConfig", "build_processor"]
