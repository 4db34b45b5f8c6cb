"""What bytes are where: specs, layouts, real buffers, scale views and their audit. No Triton, no drawing."""
