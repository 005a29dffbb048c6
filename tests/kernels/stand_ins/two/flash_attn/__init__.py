from . import flash_attn_interface

__all__ = ["flash_attn_interface"]
