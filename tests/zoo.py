"""Small modules that between them do what real models do. Each is a LightningModule with `make_batch`."""

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 53


class Zoo(L.LightningModule):
    """A module that trains on token batches and logs the gradient norm it sees before the step."""

    def __init__(self, optimizer: str = "adamw", scheduler: bool = False, log_norm: bool = True, **hyper: Any) -> None:
        super().__init__()
        self.optimizer_name, self.scheduler, self.log_norm = optimizer, scheduler, log_norm
        self.hyper = hyper
        self.norms: list[Tensor] = []
        self.losses: list[Tensor] = []
        if not log_norm:
            self.on_before_optimizer_step = super().on_before_optimizer_step

    def loss(self, batch: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach().cpu())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        assert all(g.shape == p.shape for p in self.parameters() if (g := p.grad) is not None)
        if grads:
            self.norms.append(torch.stack([g.detach().float().norm() for g in grads]).norm().cpu())

    def configure_optimizers(self) -> Any:
        kinds = {
            "adamw": torch.optim.AdamW,
            "adam": torch.optim.Adam,
            "sgd": torch.optim.SGD,
            "adafactor": torch.optim.Adafactor,
            "radam": torch.optim.RAdam,
        }
        trained = [p for p in self.parameters() if p.requires_grad]
        decay = [p for p in trained if p.dim() > 1]
        rest = [p for p in trained if p.dim() <= 1]
        groups = [g for g in ({"params": decay}, {"params": rest, "weight_decay": 0.0}) if g["params"]]
        optimizer = kinds[self.optimizer_name](groups, **{"lr": 1e-2, **self.hyper})
        if not self.scheduler:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)]


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class Encoder(Zoo):
    """`nn.TransformerEncoder` with dropout."""

    def __init__(self, layers: int = 3, dropout: float = 0.1, width: int = 32, **kw: Any) -> None:
        super().__init__(**kw)
        self.embed = nn.Embedding(VOCAB, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=dropout, batch_first=True)
        self.net = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        for i, block in enumerate(self.net.layers):  # the stack copies one layer; give each its own weights
            with torch.no_grad():
                for p in block.parameters():
                    p.add_(0.01 * (i + 1) * torch.randn_like(p))
        self.head = nn.Linear(width, VOCAB)

    def loss(self, batch: Tensor) -> Tensor:
        return token_loss(self.head(self.net(self.embed(batch))), batch)


class Tied(Encoder):
    """The head is the embedding."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(**kw)
        self.head = nn.Linear(32, VOCAB, bias=False)
        self.head.weight = self.embed.weight


class Frozen(Encoder):
    """Embedding, one whole block and part of another do not train."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(**kw)
        self.embed.requires_grad_(False)
        self.net.layers[1].requires_grad_(False)
        self.net.layers[2].linear1.requires_grad_(False)


class Cosine(Frozen):
    """Weight-decay groups, frozen layers, a cosine schedule with warm-up that moves every step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        curve = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda i: min(1.0, (i + 1) / 10) * 0.5 * (1 + math.cos(math.pi * i / 50))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": curve, "interval": "step"}}


class Llama(Zoo):
    """A Hugging Face Llama: keyword arguments, rotary embeddings made once and shared by all blocks."""

    def __init__(self, layers: int = 3, **kw: Any) -> None:
        super().__init__(**kw)
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
        self.model = AutoModelForCausalLM.from_config(config)

    def loss(self, batch: Tensor) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss


class Gpt2(Zoo):
    """A Hugging Face GPT-2: tied head, dropout, biases, buffers."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(**kw)
        from transformers import AutoModelForCausalLM, GPT2Config

        config = GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=3, n_head=4, use_cache=False)
        self.model = AutoModelForCausalLM.from_config(config)

    def loss(self, batch: Tensor) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss


class Vit(Zoo):
    """A Hugging Face vision transformer; tokens become images."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(**kw)
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=16,
            patch_size=8,
            num_labels=VOCAB,
            hidden_dropout_prob=0.1,
        )
        self.model = ViTForImageClassification(config)

    def loss(self, batch: Tensor) -> Tensor:
        images = batch.float().mean(1)[:, None, None, None].expand(-1, 3, 16, 16) / VOCAB
        ramp = torch.linspace(-1, 1, 16, device=batch.device)
        return self.model(pixel_values=images * ramp, labels=batch[:, 0]).loss


class _Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class _MoeBlock(nn.Module):
    """Tokens go to the better of the first two experts; the last two never get any, so their gradients are missing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(_Expert(width) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        h = self.norm(x)
        probabilities = self.router(h).softmax(-1)
        weight, choice = probabilities.max(-1)
        out = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            hit = choice == i
            if hit.any():
                out = out.index_put((hit,), expert(h[hit]).to(out.dtype))
        return x + out * weight[..., None], {"aux": probabilities.float().mean((0, 1)).square().sum()}


class Moe(Zoo):
    """A mixture of experts with nested outputs whose router loss passes through untouched."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(**kw)
        self.embed = nn.Embedding(VOCAB, 32)
        self.blocks = nn.ModuleList(_MoeBlock(32) for _ in range(3))
        self.head = nn.Linear(32, VOCAB)

    def loss(self, batch: Tensor) -> Tensor:
        x, aux = self.embed(batch), 0.0
        for block in self.blocks:
            x, info = block(x)
            aux = aux + info["aux"]
        return token_loss(self.head(x), batch) + 0.1 * aux


class _OddBlock(nn.Module):
    """Keyword and tuple arguments, an unused parameter, a buffer that changes, a size of its own."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.unused = nn.Parameter(torch.ones(3))
        self.batch_norm = nn.BatchNorm1d(inner)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    # `total` passes from block to block beside `x` without being computed from it outside: a tensor that feeds a unit
    # twice and something else as well has its gradient summed in another order than in one plain graph.
    def forward(self, pair: tuple[Tensor, Tensor | None], *, scale: float, mask: Tensor | None = None) -> list[Any]:
        x, total = pair
        if self.training:
            self.calls += 1
        h = self.up(self.norm(x))
        h = self.batch_norm(h.flatten(0, 1)).view_as(h)
        h = F.dropout(F.relu(h), 0.1, self.training)
        if mask is not None:
            h = h * mask
        mean = h.float().square().mean()
        x = x + scale * self.down(h)
        return [x, mean if total is None else total + mean, {"scale": scale}]


class Odd(Zoo):
    """Blocks of different sizes, one used twice, one sometimes skipped, changing buffers, a shared parameter."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(**kw)
        self.embed = nn.Embedding(VOCAB, 32)
        self.blocks = nn.ModuleList(_OddBlock(32, inner) for inner in (16, 48, 24, 40))
        self.blocks[2].up.bias = nn.Parameter(torch.zeros(24))
        self.blocks[3].norm.weight = self.blocks[0].norm.weight  # shared by two units
        self.head = nn.Linear(32, VOCAB)
        self.calls_made = 0

    def loss(self, batch: Tensor) -> Tensor:
        x: Tensor = self.embed(batch)
        total: Tensor | None = None
        mask = torch.ones((), device=x.device)
        order = [0, 1, 1, 2, 3] if self.calls_made % 3 else [0, 1, 3]
        self.calls_made += 1
        for i in order:
            x, total, extra = self.blocks[i]((x, total), scale=0.5, mask=mask if i == 1 else None)
            assert extra == {"scale": 0.5}
        assert total is not None
        return token_loss(self.head(x), batch) + 0.1 * total


ALL: dict[str, type[Zoo]] = {
    "encoder": Encoder,
    "tied": Tied,
    "frozen": Frozen,
    "llama": Llama,
    "gpt2": Gpt2,
    "vit": Vit,
    "moe": Moe,
    "odd": Odd,
}
