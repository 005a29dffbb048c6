"""Models: parameters in layers, over any number of ranks."""

from .decoder import Decoder, DecoderConfig
from .generation import generate
from .longnet import LongNet, LongNetConfig, LongNetLM

__all__ = ["Decoder", "DecoderConfig", "LongNet", "LongNetConfig", "LongNetLM", "generate"]
