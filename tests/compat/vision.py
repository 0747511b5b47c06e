"""Models of timm and torchvision."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.compat.case import NUM_SAMPLES, Case, Listed, Rows, classes, floats
from tests.compat.recipes import STATISTICS, classify

NUM_CLASSES = 3


def pictures(size: int = 32) -> TensorDataset:
    return TensorDataset(floats(3, size, size), classes(NUM_CLASSES))


def single() -> TensorDataset:
    """Pictures in float32."""
    images, labels = pictures().tensors
    return TensorDataset(images.float(), labels)


def timm_model(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=NUM_CLASSES, **options)


def torchvision_model(name: str, **options: Any) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, num_classes=NUM_CLASSES, weights=None, **options)


def small_vit() -> nn.Module:
    return timm_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=32, num_heads=2)


def mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(NUM_CLASSES, img_size=32, patch_size=8, num_blocks=2, embed_dim=32)


def gentle(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 5e-4)


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(1, channels)


def timm_optimizer(params: Any) -> torch.optim.Optimizer:
    import timm.optim

    return timm.optim.create_optimizer_v2(params, "lamb", lr=1e-2)


class Mixed:
    """Images and soft labels of timm's ``Mixup``, as its loader's collate function makes them."""

    def __call__(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        from timm.data import Mixup

        images, labels = (torch.stack(column) for column in zip(*samples, strict=True))
        mixed: tuple[Tensor, Tensor] = Mixup(num_classes=NUM_CLASSES, label_smoothing=0.0)(
            images, labels
        )
        return mixed


def soft_loss(model: nn.Module, batch: Any) -> Tensor:
    from timm.loss import SoftTargetCrossEntropy

    loss: Tensor = SoftTargetCrossEntropy()(model(batch[0]), batch[1].to(batch[0].dtype))
    return loss


def transformed() -> Listed:
    """Images transformed by ``torchvision.transforms.v2`` at each access."""
    from torchvision.transforms import v2

    change = v2.Compose([v2.RandomHorizontalFlip(), v2.Normalize([0.5] * 3, [0.5] * 3)])
    images, labels = single().tensors

    class Changed(Listed):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return change(image), label

    return Changed(list(zip(images, labels, strict=True)))


def boxed() -> Listed:
    """Images with one or two boxes, in the format of torchvision's detection models."""
    samples = []
    for index in range(NUM_SAMPLES):
        corners = torch.rand(1 + index % 2, 2) * 16
        boxes = torch.cat([corners, corners + 12], 1)
        target = {"boxes": boxes, "labels": torch.ones(len(boxes), dtype=torch.int64)}
        samples.append((torch.rand(3, 32, 32), target))
    return Listed(samples)


def detector() -> nn.Module:
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    backbone = nn.Sequential(nn.Conv2d(3, 16, 8, stride=8), nn.ReLU())
    backbone.out_channels = 16
    anchors = AnchorGenerator(sizes=((16, 32),), aspect_ratios=((1.0,),))
    return RetinaNet(backbone, 2, min_size=32, max_size=32, anchor_generator=anchors)


def apart(samples: list[Any]) -> tuple[list[Tensor], list[Any]]:
    """The collate function of torchvision's detection scripts."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def detect(model: nn.Module, batch: Any) -> Tensor:
    images, targets = batch
    losses: dict[str, Tensor] = model(images, targets)
    return torch.stack(list(losses.values())).sum()


def masks() -> Rows:
    return Rows(image=floats(3, 32, 32).float(), mask=classes(NUM_CLASSES, 32, 32))


def segment(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["image"])["out"], batch["mask"])


def case(group: str, name: str, make: Any, data: Any = pictures, **rest: Any) -> Case:
    return Case(name=name, group=group, make=make, data=data, **{"loss": classify, **rest})


timm_case = partial(case, "timm")
torchvision_case = partial(case, "torchvision")
NORMED: Any = {"differs": STATISTICS, "double": False, "optimizer": gentle}
CASES = [
    timm_case("ResNet (test_resnet)", lambda: timm_model("test_resnet"), single, **NORMED),
    timm_case(
        "EfficientNet (test_efficientnet)",
        lambda: timm_model("test_efficientnet"),
        single,
        **NORMED,
    ),
    timm_case("ViT (vit_tiny_patch16_224)", small_vit),
    timm_case("ConvNeXt (test_convnext)", lambda: timm_model("test_convnext")),
    timm_case("NFNet (test_nfnet)", lambda: timm_model("test_nfnet"), optimizer=gentle),
    timm_case(
        "Swin (swin_tiny_patch4_window7_224)",
        lambda: timm_model(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            window_size=4,
            depths=(1, 1),
            embed_dim=16,
            num_heads=(2, 2),
            drop_path_rate=0.0,
        ),
    ),
    timm_case(
        "MLP-Mixer, timm's LAMB",
        mixer,
        optimizer=timm_optimizer,
        unlike={"FSDP": "LAMB takes the norms of shards"},
    ),
    timm_case(
        "ViT with timm's Mixup",
        small_vit,
        loader={"collate_fn": Mixed()},
        loss=soft_loss,
        differs="each batch draws its own mix",
    ),
    torchvision_case("ResNet-18", lambda: torchvision_model("resnet18"), single, **NORMED),
    torchvision_case(
        "ResNet-18 with GroupNorm",
        lambda: torchvision_model("resnet18", norm_layer=group_norm),
        lambda: pictures(16),
        optimizer=gentle,
    ),
    torchvision_case(
        "MobileNetV3, transforms.v2",
        lambda: torchvision_model("mobilenet_v3_small", dropout=0.0),
        transformed,
        **NORMED,
    ),
    torchvision_case(
        "RetinaNet in train mode",
        detector,
        boxed,
        loss=detect,
        whole=True,
        loader={"collate_fn": apart},
        double=False,
        optimizer=gentle,
        tolerance=1e-3,
    ),
    torchvision_case(
        "LR-ASPP segmentation",
        lambda: torchvision_model("lraspp_mobilenet_v3_large", weights_backbone=None),
        masks,
        loss=segment,
        **NORMED,
    ),
]
