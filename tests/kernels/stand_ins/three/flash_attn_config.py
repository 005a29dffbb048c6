"""What a build of flash-attn 3 that leaves out nothing says of itself."""

LEFT_OUT = ("BACKWARD", "LOCAL", "VARLEN", "FP16", "HDIM64", "HDIM96", "HDIM128", "HDIM192", "HDIM256")
CONFIG = {"build_flags": {f"FLASHATTENTION_DISABLE_{name}": False for name in LEFT_OUT}}
