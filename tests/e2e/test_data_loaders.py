"""DataLoader workers that run fused transforms: processes that are forked after groups ran, and new ones."""

import pytest

from kit.support import run_python

SOURCE = """
import torch, tsfuser
from torch.utils.data import DataLoader, Dataset

tsfuser.enable()

def normalize(x, mean, scale):
    return torch.tanh((x - mean) * scale) + torch.sigmoid(x)

scripted = torch.jit.script(normalize)

class Images(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, k):
        x = torch.arange(3 * 32 * (32 + k % 2), dtype=torch.float32).reshape(3, 32, -1) / 1000 + k
        given = x, x.mean((1, 2), keepdim=True), torch.full((3, 1, 1), 0.5)
        with torch.no_grad():
            for _ in range(3):
                y = scripted(*given)
        return y[..., :32], normalize(*given)[..., :32], tsfuser.stats()["launches"]

if __name__ == "__main__":
    big = torch.rand(3, 1000, 1000)  # several threads run its kernel
    for _ in range(4):
        scripted(big, big.mean(), torch.ones(3, 1, 1))
    before = tsfuser.stats()["launches"]
    assert before > 0
    context = "HOW"
    loader = DataLoader(Images(), 4, num_workers=2, multiprocessing_context=context, persistent_workers=True)
    for epoch in range(2):
        launches = []
        for fused, eager, count in loader:
            torch.testing.assert_close(fused, eager)
            launches.append(int(count.max()))
        assert len(launches) == 6
    assert max(launches) > (before if context == "fork" else 0), launches
    after = scripted(big, big.mean(), torch.ones(3, 1, 1))  # the parent still runs
    torch.testing.assert_close(after, normalize(big, big.mean(), torch.ones(3, 1, 1)))
    print("done")
"""


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers_run_fused_transforms(tmp_path, how):
    status, out, err = run_python(tmp_path, SOURCE.replace("HOW", how), whole_end=True)
    assert status == 0 and "done" in out, err
