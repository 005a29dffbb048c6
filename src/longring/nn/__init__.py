"""Modules: attention without parameters, multi-head attention, positions, layers, caches; and losses over shards."""

from .attention import Attention, DilatedAttention, RingAttention
from .cache import Cache, LayerCache
from .layers import DecoderLayer, EncoderLayer, FeedForward
from .loss import cross_entropy, next_tokens
from .multihead import Multihead, MultiheadAttention, MultiheadDilatedAttention, magneto_gain
from .positions import Angles, Rotary, XPos

__all__ = [
    "Angles",
    "Attention",
    "Cache",
    "DecoderLayer",
    "DilatedAttention",
    "EncoderLayer",
    "FeedForward",
    "LayerCache",
    "Multihead",
    "MultiheadAttention",
    "MultiheadDilatedAttention",
    "RingAttention",
    "Rotary",
    "XPos",
    "cross_entropy",
    "magneto_gain",
    "next_tokens",
]
