"""Models of packages in the ways in which programs use them, each call equal to unfused."""

import dataclasses
import functools
import io

import pytest
import torch
import ways
import zoo
from runs import Copies, Record, copies, run

import tsfuser

pytestmark = pytest.mark.usefixtures("fused_or_error")


def scripted(program, place):
    """The scripted module with the methods that some ways call. It shares its class with no other. It is made
    on its device, as a trace holds devices."""
    torch.jit._recursive.concrete_type_store.type_store.clear()
    return ways.with_methods(program.script(program.build().eval().to(place)), program)


@functools.cache
def scripted_once(name, place):
    """For copies by way of a file."""
    return scripted(zoo.by_name(name), place)


@pytest.fixture
def record(request, target, program, record_property):
    """The row of the table."""
    made = Record(program.name, request.function.__name__[5:].replace("_", " "), target)
    tsfuser.reset()
    yield made
    record_property("packages", {**dataclasses.asdict(made), "precision": str(made.precision)})


@pytest.fixture
def program(request):
    found = zoo.by_name(request.param)
    reason = found.missing()
    if reason:
        pytest.skip(reason)
    return found


def of_programs(condition=lambda program: True):
    """Marks a test that takes each program for which the condition holds."""
    names = [program.name for program in zoo.programs() if condition(program)]
    return pytest.mark.parametrize("program", names, indirect=True)


def found(program, place, train=False):
    make = (
        functools.partial(scripted_once, program.name, place)
        if program.loads
        else functools.partial(scripted, program, place)
    )
    made = copies(make, program, place)
    for module in (made.fused, made.plain, made.exact):
        if module is not None:
            module.train(train)
    return made


def found_compiled(program, place, train):
    """What torch.compile makes of the package's module, and copies that run in eager mode."""
    torch._dynamo.reset()
    fused, plain, exact = (program.build().to(place).train(train) for _ in range(3))
    for module in (plain, exact):
        module.load_state_dict(fused.state_dict())
    return Copies(torch.compile(fused, backend="tsfuser"), plain, exact.double())


def plain_way(program):
    return ways.with_gradients if program.own_forces else ways.inference


@of_programs()
def test_inference(program, place, record):
    run(found(program, place), plain_way(program), program, place, record)


@of_programs(lambda program: program.forces)
def test_forces_outside(program, place, record):
    run(found(program, place), ways.forces_outside, program, place, record)


@of_programs(lambda program: program.forces)
def test_forces_inside(program, place, record):
    run(found(program, place), ways.forces_inside, program, place, record)


@of_programs(lambda program: program.trains and not program.own_forces)
def test_training(program, place, record):
    run(found(program, place, train=True), ways.training, program, place, record)


@of_programs(lambda program: program.trains and (program.forces or program.own_forces))
def test_training_on_forces(program, place, record):
    way = ways.training_on_own_forces if program.own_forces else ways.training_on_forces
    run(found(program, place, train=True), way, program, place, record)


@of_programs(lambda program: program.loads)
def test_saved_and_loaded(program, place, record):
    """A module is saved after it ran fused."""
    made = found(program, place)
    way, sizes = plain_way(program), program.sizes[:3]
    run(made, way, program, place, record, sizes[:1])
    stored = io.BytesIO()
    torch.jit.save(made.fused, stored)
    made.fused = torch.jit.load(io.BytesIO(stored.getvalue()), map_location=place)
    run(made, way, program, place, record, sizes)


@of_programs()
def test_frozen(program, place, record):
    made = found(program, place)
    made.fused = torch.jit.freeze(made.fused)
    run(made, plain_way(program), program, place, record, program.sizes[:4])


@of_programs(lambda program: program.forces)
def test_forces_outside_of_frozen(program, place, record):
    made = found(program, place)
    made.fused = torch.jit.freeze(made.fused)
    run(made, ways.forces_outside, program, place, record, program.sizes[:4])


@of_programs(lambda program: not (program.stateful or program.own_forces))
def test_fork_and_wait(program, place, record):
    run(found(program, place), ways.side_by_side, program, place, record, program.sizes[:4])


@of_programs(lambda program: program.compiles)
def test_compiled(program, place, record):
    run(found_compiled(program, place, train=False), plain_way(program), program, place, record)


@of_programs(lambda program: program.compiles and program.trains and not program.own_forces)
def test_compiled_training(program, place, record):
    """Not of one row: batch norms reject that, and Dynamo raises an error of another type."""
    sizes = [size for size in program.sizes if size > 1]
    run(found_compiled(program, place, train=True), ways.training, program, place, record, sizes)
