"""VGG19 and its loss in numpy, float64, of any width: what the scripts' numbers are compared with. Knows no TensorFlow."""

import numpy as np

BLOCKS = [2, 2, 4, 4, 4]  # convolutions in each
CONVOLUTIONS = ['conv%d_%d' % (block, i) for block, count in enumerate(BLOCKS, 1) for i in range(1, count + 1)]
LAYERS = CONVOLUTIONS + ['fc6', 'fc7', 'fc8']
DECAYED = ['conv1_1', 'conv2_1', 'conv3_1', 'conv4_1', 'conv5_1', 'fc6', 'fc7']


def taps(x, stride, padding):
  """What each tap of a 3x3 SAME window sees of x [batch, size, size, channels]: nine arrays [batch, out, out, channels]."""
  size = x.shape[1]
  out = -(-size // stride)
  total = max((out - 1) * stride + 3 - size, 0)
  around = (total // 2, total - total // 2)
  padded = np.pad(x, [(0, 0), around, around, (0, 0)], 'constant', constant_values=padding)
  reach = (out - 1) * stride + 1
  return [padded[:, row : row + reach : stride, column : column + reach : stride] for row in range(3) for column in range(3)]


def convolution(x, kernel, biases, stride):
  return sum(tap @ weights for tap, weights in zip(taps(x, stride, 0), kernel.reshape(9, *kernel.shape[2:]))) + biases


def logits(values, images):
  """Logits [batch, classes] in evaluation, from {variable's name: value} and standardised images [batch, 28, 28, 3]."""
  values = {name: np.asarray(value, np.float64) for name, value in values.items()}
  x = np.asarray(images, np.float64)
  for name in CONVOLUTIONS:
    stride = 2 if name == 'conv1_2' else 1
    x = np.maximum(convolution(x, values[name + '/weights'], values[name + '/biases'], stride), 0)
    if name in ('conv1_2', 'conv2_2', 'conv3_4', 'conv4_4', 'conv5_4'):
      x = np.maximum.reduce(taps(x, 2, -np.inf))
  x = x.reshape(len(x), -1)
  for name in ('fc6', 'fc7'):
    x = np.maximum(x @ values[name + '/weights'] + values[name + '/biases'], 0)
  return x @ values['fc8/weights'] + values['fc8/biases']


def cross_entropy(logits, labels):
  """Mean over the batch, in nats; labels are integers [batch]."""
  logits = np.asarray(logits, np.float64)
  shifted = logits - logits.max(1, keepdims=True)
  return np.mean(np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels])


def weight_decay(values):
  return 0.0004 * sum((np.asarray(values[name + '/weights'], np.float64) ** 2).sum() / 2 for name in DECAYED)


def losses(values, images, labels):
  return cross_entropy(logits(values, images), labels) + weight_decay(values)


def slope(values, name, direction, images, labels, step=1e-6):
  """Derivative of `losses` as variable `name` moves along `direction`, by a central difference."""
  there, back = (dict(values, **{name: values[name] + sign * step * direction}) for sign in (1, -1))
  return (losses(there, images, labels) - losses(back, images, labels)) / (2 * step)


def evaluation_images(images):
  """What evaluation makes of uint8 images [n, 32, 32, 3]: the centres, standardised."""
  pixels = images[:, 2:30, 2:30].astype(np.float64)
  deviation = np.maximum(pixels.std((1, 2, 3), keepdims=True), 1 / np.sqrt(28 * 28 * 3))
  return (pixels - pixels.mean((1, 2, 3), keepdims=True)) / deviation
