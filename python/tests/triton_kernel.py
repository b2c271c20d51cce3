"""A kernel that needs scratch memory for its descriptors: a part of plugs_on_gpu.py. Triton reads kernels from their files."""

import torch
import triton
import triton.language as tl


@triton.jit
def double(source, target, rows, columns, SIDE: tl.constexpr):
    read = tl.make_tensor_descriptor(source, shape=[rows, columns], strides=[columns, 1], block_shape=[SIDE, SIDE])
    write = tl.make_tensor_descriptor(target, shape=[rows, columns], strides=[columns, 1], block_shape=[SIDE, SIDE])
    row, column = tl.program_id(0) * SIDE, tl.program_id(1) * SIDE
    write.store([row, column], read.load([row, column]) * 2)


def doubled(x):
    target = torch.empty_like(x)
    double[(x.shape[0] // 64, x.shape[1] // 64)](x, target, *x.shape, SIDE=64)
    return target
