"""Models as Flax's documentation has them: nothing here knows of fp4jax."""

import jax
import jax.numpy as jnp
from flax import nnx


class MLP(nnx.Module):
    """The MLP of "Flax Basics", with its BatchNorm and Dropout."""

    def __init__(self, din: int, dmid: int, dout: int, *, rngs: nnx.Rngs):
        self.linear1 = nnx.Linear(din, dmid, rngs=rngs)
        self.dropout = nnx.Dropout(rate=0.1, rngs=rngs)
        self.bn = nnx.BatchNorm(dmid, rngs=rngs)
        self.linear2 = nnx.Linear(dmid, dout, rngs=rngs)

    def __call__(self, x: jax.Array):
        x = nnx.gelu(self.dropout(self.bn(self.linear1(x))))
        return self.linear2(x)


class CNN(nnx.Module):
    """The MNIST tutorial's CNN, narrower."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(4, 8, kernel_size=(3, 3), rngs=rngs)
        self.linear1 = nnx.Linear(8 * 2 * 2, 32, rngs=rngs)
        self.linear2 = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.conv1(x)), window_shape=(2, 2), strides=(2, 2))
        x = nnx.avg_pool(nnx.relu(self.conv2(x)), window_shape=(2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        return self.linear2(nnx.relu(self.linear1(x)))


class TransformerBlock(nnx.Module):
    """The block of the miniGPT tutorial."""

    def __init__(self, embed_dim: int, num_heads: int, ff_dim: int, *, rngs: nnx.Rngs, rate: float = 0.1):
        self.mha = nnx.MultiHeadAttention(num_heads=num_heads, in_features=embed_dim, decode=False, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=rate, rngs=rngs)
        self.layer_norm1 = nnx.LayerNorm(num_features=embed_dim, epsilon=1e-6, rngs=rngs)
        self.linear1 = nnx.Linear(in_features=embed_dim, out_features=ff_dim, rngs=rngs)
        self.linear2 = nnx.Linear(in_features=ff_dim, out_features=embed_dim, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=rate, rngs=rngs)
        self.layer_norm2 = nnx.LayerNorm(num_features=embed_dim, epsilon=1e-6, rngs=rngs)

    def __call__(self, inputs):
        mask = jnp.tril(jnp.ones((inputs.shape[1], inputs.shape[1])))
        attention = self.dropout1(self.mha(inputs, mask=mask))
        out = self.layer_norm1(inputs + attention)
        return self.layer_norm2(out + self.dropout2(self.linear2(nnx.relu(self.linear1(out)))))


class MiniGPT(nnx.Module):
    """The miniGPT tutorial's model, small."""

    def __init__(self, maxlen: int, vocab_size: int, embed_dim: int, num_blocks: int, *, rngs: nnx.Rngs):
        self.token_emb = nnx.Embed(num_embeddings=vocab_size, features=embed_dim, rngs=rngs)
        self.pos_emb = nnx.Embed(num_embeddings=maxlen, features=embed_dim, rngs=rngs)
        self.transformer_blocks = nnx.List(
            [TransformerBlock(embed_dim, 2, 2 * embed_dim, rngs=rngs) for _ in range(num_blocks)]
        )
        self.output_layer = nnx.Linear(in_features=embed_dim, out_features=vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, inputs):
        x = self.token_emb(inputs) + self.pos_emb(jnp.arange(inputs.shape[1])[None, :])
        for block in self.transformer_blocks:
            x = block(x)
        return self.output_layer(x)


class Block(nnx.Module):
    """A residual block of the guide on scanning over layers."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs, dtype=None):
        self.linear = nnx.Linear(dim, dim, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(dim, dim, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return x + self.out(nnx.relu(self.linear(x)))


class Scanned(nnx.Module):
    """That guide's model: blocks stacked by vmap, run by scan, with a head of its own."""

    def __init__(self, dim: int, num_layers: int, *, rngs: nnx.Rngs, remat: bool = False, dtype=None):
        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def create_block(rngs: nnx.Rngs):
            return Block(dim, rngs=rngs, dtype=dtype)

        self.layers = create_block(rngs)
        self.head = nnx.Linear(dim, dim, rngs=rngs)
        self.remat = remat

    def __call__(self, x):
        def run(x, block):
            return block(x)

        run = nnx.remat(run) if self.remat else run
        x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        return self.head(x)
