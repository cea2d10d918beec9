"""Random optimizers of torch.optim, whose steps torch.compile compiles.

In: a seed. Out: an `OptimizerProgram`, which a sweep takes as it takes a Program: what it is, how it runs,
and what it should give. Parameters and gradients are multiples of 1/8, so that signs of gradients are exact.
Muon, whose bfloat16 products amplify roundings, LBFGS and SparseAdam are not among them. Example:

    program = generate_optimizer(7)
    print(program.source())          # -> torch.optim.AdamW, lr=0.125, amsgrad=True, foreach=False; ...
"""

import random
from dataclasses import dataclass

import torch

from kit.random_compare import last_roundings
from kit.roundings import Shaken
from kit.support import EPSILON

STEPS = 3
#: name -> options and the values that they may have
_OPTIONS = {
    "SGD": {"momentum": (0, 0.5), "weight_decay": (0, 0.125), "maximize": (False, True)},
    "Adam": {"amsgrad": (False, True), "weight_decay": (0, 0.125), "maximize": (False, True)},
    "AdamW": {"amsgrad": (False, True), "weight_decay": (0.125, 0.5), "maximize": (False, True)},
    "NAdam": {"weight_decay": (0, 0.125), "decoupled_weight_decay": (False, True)},
    "RAdam": {"weight_decay": (0, 0.125), "decoupled_weight_decay": (False, True)},
    "Adamax": {"weight_decay": (0, 0.125), "maximize": (False, True)},
    "Adagrad": {"weight_decay": (0, 0.125), "lr_decay": (0, 0.125), "initial_accumulator_value": (0, 0.5)},
    "Adadelta": {"rho": (0.5, 0.9), "weight_decay": (0, 0.125), "maximize": (False, True)},
    "RMSprop": {"momentum": (0, 0.5), "centered": (False, True), "weight_decay": (0, 0.125)},
    "Rprop": {"etas": ((0.5, 1.25),), "maximize": (False, True)},
    "ASGD": {"lambd": (0.125, 0.0001), "alpha": (0.75,), "weight_decay": (0, 0.125)},
    "Adafactor": {"weight_decay": (0, 0.125), "d": (1.0, 2.0)},
}
_DTYPES = (
    (torch.float32,),
    (torch.float32,),
    (torch.bfloat16,),
    (torch.float64,),
    (torch.float32, torch.float64),
)
_SIZES = (1, 2, 3, 5, 8, 17, 40)


@dataclass(frozen=True)
class OptimizerProgram:
    """`parameters`: shape and dtype of each. It has one call, of some steps."""

    name: str
    options: tuple  # (name, value)
    parameters: tuple
    seed: int
    features: tuple = ("optimizers",)
    doors: tuple = ("compile",)
    gradients: bool = False
    calls: tuple = ({},)

    def source(self):
        options = ", ".join(f"{name}={value!r}" for name, value in self.options)
        shapes = ", ".join(f"{str(dtype)[6:]}{list(shape)}" for shape, dtype in self.parameters)
        return f"torch.optim.{self.name}, {options}; parameters {shapes}; seed {self.seed}"

    def made(self, device, dtype=None):
        """Parameters, an optimizer, and for each step the gradients."""
        generator = torch.Generator().manual_seed(self.seed)

        def tensor(shape, own):
            x = torch.randint(1, 25, shape, generator=generator) / 8
            sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
            return (x * sign).to(device, dtype or own)

        parameters = [torch.nn.Parameter(tensor(*p)) for p in self.parameters]
        gradients = [[tensor(*p) for p in self.parameters] for _ in range(STEPS)]
        return parameters, getattr(torch.optim, self.name)(parameters, **dict(self.options)), gradients

    def outcome(self, function, call, device):
        """Parameters and state after the steps; `function` makes of a step what is run."""
        return _outcome(self.made(device), function)

    def expected(self, device, trials):
        """As `random_compare.expectation`: eager's, the exact ones, how far off they may be."""
        eager, exact = self.outcome(lambda step: step, 0, device), self._noisy(None, 0)
        epsilon = max(EPSILON[dtype] for _, dtype in self.parameters)
        others = [eager, *(self._noisy(epsilon, seed) for seed in range(1, trials + 1))]
        found = {}
        for name, tensor in eager.items():
            off = max(float((o[name].cpu().double() - exact[name].double()).abs().max()) for o in others)
            allowed = 4 * off + last_roundings(tensor.dtype, exact[name])
            found[name] = tensor, exact[name], allowed if tensor.is_floating_point() else None
        return found

    def _noisy(self, epsilon, seed):
        shaken = Shaken(seed)
        with shaken, shaken.by(epsilon):
            return _outcome(self.made("cpu", torch.float64), lambda step: step)


def _outcome(made, function):
    parameters, optimizer, gradients = made
    step = function(optimizer.step)
    for given in gradients:
        for parameter, gradient in zip(parameters, given):
            parameter.grad = gradient.clone()
        step()
    found = {f"parameter {k}": p for k, p in enumerate(parameters)}
    for k, p in enumerate(parameters):
        state = optimizer.state[p].items()
        found |= {f"{name} {k}": x for name, x in state if isinstance(x, torch.Tensor)}
    return {name: x.detach() for name, x in found.items()}


def generate_optimizer(seed):
    """The program of a seed."""
    rng = random.Random(f"optimizer {seed}")
    name = rng.choice(list(_OPTIONS))
    options = [(key, rng.choice(values)) for key, values in _OPTIONS[name].items()]
    options.append(("lr", rng.choice((0.125, 0.0625, 0.01))))
    if name in ("SGD", "Adam", "AdamW") and rng.random() < 0.25:
        options.append(("fused", True))
    elif rng.random() < 0.7:
        options.append(("foreach", rng.random() < 0.4))
    dtypes, parameters = rng.choice(_DTYPES), []
    for _ in range(rng.choice((1, 2, 3, 6))):
        shape = tuple(rng.choice(_SIZES) for _ in range(rng.randint(0, 3)))
        parameters.append((shape, rng.choice(dtypes)))
    return OptimizerProgram(name, tuple(options), tuple(parameters), seed)
