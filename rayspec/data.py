"""For Ray Data users: `build_processor(ProcessorConfig(...))(dataset)`, as in `ray.data.llm`."""

from rayspec.batch.processor import Processor, ProcessorConfig, build_processor

__all__ = ["Processor", "ProcessorConfig", "build_processor"]
