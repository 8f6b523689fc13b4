"""Unusual graphs, functions and threads of the backward: exact."""

from __future__ import annotations

import threading

import torch
from torch import nn

from tests.memory.programs import IMAGES, X, exact, mlp

# -- the graph --------------------------------------------------------------------------------------------------------


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(600, 4)
    )


def test_retain_graph():
    def twice(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    exact(conv_net(), lambda net: net(IMAGES).square().sum(), twice)


def test_double_backward():
    net = mlp(16, 16, 1)

    def penalty(loss):
        grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        (loss + sum(g.square().sum() for g in grads)).backward()

    exact(net, lambda net: net(X).square().mean(), penalty)


def test_gradient_penalty_inside_the_step():
    net = mlp(16, 16, 1)

    def step(net):
        inputs = X.clone().requires_grad_()
        score = net(inputs)
        (grad,) = torch.autograd.grad(score.sum(), inputs, create_graph=True)
        return score.mean() + (grad.norm(dim=1) - 1).square().mean() + net(grad).exp().mean()

    exact(net, step)


def test_two_losses_with_a_shared_trunk():
    net = nn.ModuleDict({"trunk": mlp(16, 16), "a": mlp(16, 4), "b": mlp(16, 3)})

    def step(net):
        hidden = net["trunk"](X)
        net.second = net["b"](hidden).exp().sum()
        return net["a"](hidden).square().sum()

    def one_after_the_other(loss):
        loss.backward(retain_graph=True)
        net.second.backward()
        del net.second

    exact(net, step, one_after_the_other)


def test_hooks_on_tensors_and_modules():
    net = mlp(16, 16, 16)
    net[0].register_full_backward_hook(
        lambda module, grad_in, grad_out: (grad_in[0] * 2 if grad_in[0] is not None else None,)
    )

    def step(net):
        hidden = net[:3](X)
        hidden.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
        return net[3:](hidden).exp().sum()

    exact(net, step)


def test_frozen_layers_and_unused_outputs():
    net = nn.ModuleList([mlp(16, 16), mlp(16, 16), mlp(16, 16)])
    net[0].requires_grad_(False)

    def step(net):
        hidden = net[0](X)
        net[2](hidden).exp()
        return net[1](hidden).exp().sum()

    exact(net, step)


# -- autograd.Function ------------------------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    """Keeps its input, its output and, against all advice, a tensor as a plain attribute."""

    @staticmethod
    def forward(ctx, x, y):
        out = x**3 * y
        ctx.save_for_backward(x, y, out)
        ctx.square, ctx.shift = x * x, 0.5
        return out, (x > 0).float()

    @staticmethod
    def backward(ctx, grad, _):
        x, y, out = ctx.saved_tensors
        return grad * 3 * ctx.square * y + ctx.shift * out, grad * x**3


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 0.5 + 0 * x


def test_custom_functions():
    net = mlp(16, 16, 16)

    def step(net):
        cubed, mask = Cube.apply(net[:3](X), net(X))
        halved = Halve.apply(cubed.exp().clone())
        return (halved * mask).sin().sum()

    exact(net, step, seeds=8)


# -- threads ----------------------------------------------------------------------------------------------------------


def test_backward_on_another_thread():
    def elsewhere(loss):
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    exact(conv_net(), lambda net: net(IMAGES).square().sum(), elsewhere)


def test_backward_on_two_threads_at_once():
    net = nn.ModuleList([mlp(16, 16, 16, 16), mlp(16, 8), mlp(16, 8)])

    def step(net):
        hidden = net[0](X)
        net.losses = [head(hidden).exp().sum() for head in net[1:]]
        return sum(net.losses)

    def together(_):
        leaves, got = list(net.parameters()), [None, None]

        def run(i):
            got[i] = torch.autograd.grad(net.losses[i], leaves, retain_graph=True, allow_unused=True)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del net.losses
        for leaf, *grads in zip(leaves, *got, strict=True):
            leaf.grad = sum(g for g in grads if g is not None)

    exact(net, step, together)
