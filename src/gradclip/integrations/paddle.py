"""PaddlePaddle: `ClipGrad`, an optimizer's `grad_clip=`, and `attach`, which makes the optimizer that you have clip."""

from __future__ import annotations

import paddle

import gradclip

paddle.jit.ignore_module([gradclip])
