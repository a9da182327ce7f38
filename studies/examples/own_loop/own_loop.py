"""A training loop of your own, which a study file gets by `code: own_loop.py`: a ConvNet on small images."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpo


def loss_of_batch(model, batch):
    images, classes = batch
    return cross_entropy(model(images), classes)


def noisy_images(number):
    """Return noisy copies of ten random images, [number, 1, 8, 8], and the class of each, [number]."""
    generator = torch.Generator().manual_seed(0)
    originals = torch.rand(10, 1, 8, 8, generator=generator)
    classes = torch.randint(10, (number,), generator=generator)
    return originals[classes] + 0.5 * torch.randn(number, 1, 8, 8, generator=generator), classes


@hpo.trial
def train(run):
    images, classes = (tensor.to(run.device) for tensor in noisy_images(1800))
    train_set, test_set = (images[:1400], classes[:1400]), (images[1400:], classes[1400:])

    width = run.params["width"]
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16 * width, 10),
    ).to(run.device)
    # Ends the trial if its precision does not work with this model and batch.
    amp = run.prepare(model, loss_of_batch, (images[:32], classes[:32]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.params["learning_rate"])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run.keep(model=model, optimizer=optimizer, schedule=schedule)

    for _ in run.steps(run.params["epochs"]):  # begins where the checkpoint ended
        model.train()
        for rows in torch.randperm(len(train_set[0]), device="cpu").split(run.params["batch_size"]):
            amp.step(loss_of_batch, (train_set[0][rows], train_set[1][rows]), optimizer)
        schedule.step()
        model.eval()
        with amp.evaluation():
            right = model(amp.inputs(test_set[0])).argmax(1) == test_set[1]
        run.report({"accuracy": right.float().mean()})  # the trial may pause or be pruned here
