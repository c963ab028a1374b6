"""VGG19 for 28x28 images: layers, logits, loss; finding and restoring a checkpoint.

  python network.py        the layer table: name, output shape, parameters, multiply-adds of one image

19 weight layers, 38,947,914 parameters. Knows no flags, and of files only checkpoints.
"""

import collections
import glob
import os
import re
import shutil

if __name__ == '__main__':
  import data_input  # run alone, it starts like the other scripts; as a module it knows nothing of data_input
import numpy as np
import tensorflow.compat.v1 as tf

# Output channels of the 3x3 convolutions, block by block; each block ends in a max pool.
BLOCKS = [[64, 64], [128, 128], [256] * 4, [512] * 4, [512] * 4]
DENSE = [4096, 4096]
WEIGHT_DECAY = 0.0004
# Finite points at which the transforms of 4 pixels evaluate; the usual 0, 1, -1, 2, -2 round five times as badly.
POINTS = [0, 0.75, -0.75, 1.5, -1.5]
TRAINING_DONE = 'training_done'
FILE_SUFFIX = r'\.(index|meta|data-\d{5}-of-\d{5})$'  # of a checkpoint's files, after its prefix
flags = tf.app.flags


# What TensorFlow 1.15 and 2.x raise where a file is damaged or gone.
READ_ERRORS = (tf.errors.OpError, IndexError, RuntimeError)


class CheckpointError(flags.Error, ValueError):
  """There is no checkpoint that can be used; the message says where, why and what would mend it."""


# ---------------------------------------------------------------- layers


def transforms(size):
  """Returns the matrices of Winograd's minimal filtering, for a SAME convolution of `size` values with 3 taps.

  The convolution of values x with taps k is to_outputs @ ((to_taps @ k) * (to_inputs @ x)), with few products; see Lavin
  and Gray 2016, arXiv:1509.09308. For sizes 1 and 2 the products that padding would make zero are left out as well.

  Returns:
    to_inputs [products, size], to_taps [products, 3] and to_outputs [size, products].
  """
  if size == 1:
    return np.array([[1]]), np.array([[0, 1, 0]]), np.array([[1]])
  if size == 2:  # y0 = k1 (x0 + x1) + (k2 - k1) x1;  y1 = k1 (x0 + x1) + (k0 - k1) x0
    return np.array([[1, 1], [0, 1], [1, 0]]), np.array([[0, 1, 0], [0, -1, 1], [1, -1, 0]]), np.array([[1, 1, 0], [1, 0, 1]])
  points = np.array(POINTS[: size + 1])[:, None]

  def powers(count):
    return np.vstack([points ** np.arange(count), np.eye(count)[-1]])  # the last row is the point at infinity

  to_inputs = np.linalg.inv(powers(size + 2)).T[:, 1:-1]
  return to_inputs, powers(3), powers(size).T


def convolve(images, kernel, stride=1):
  """SAME convolution of images [batch, height, width, in] with a 3x3 kernel [3, 3, in, out].

  Maps up to 4x4 are convolved by `transforms` in both directions, as one batched matrix product. It needs a quarter of
  the products at 4x4, and none for padding at 2x2 and 1x1; on a CPU it is several times as fast as tf.nn.conv2d
  (tests/benchmarks/run.py step). The results agree to within 1e-5 of the largest output.
  """
  height, width, channels = images.shape.as_list()[1:]
  if stride > 1 or max(height, width) > 4:
    return tf.nn.conv2d(images, kernel, [1, stride, stride, 1], 'SAME')
  filters = kernel.shape.as_list()[3]
  to_inputs, to_taps, to_outputs = (
    np.kron(of_rows, of_columns).astype(np.float32) for of_rows, of_columns in zip(transforms(height), transforms(width))
  )
  taps = tf.reshape(tf.matmul(to_taps, tf.reshape(kernel, [9, channels * filters])), [-1, channels, filters])
  inputs = tf.tensordot(to_inputs, tf.reshape(images, [-1, height * width, channels]), [[1], [1]])
  outputs = tf.tensordot(tf.matmul(inputs, taps), to_outputs, [[0], [1]])  # [batch, out, pixel]
  return tf.reshape(tf.transpose(outputs, [0, 2, 1]), [-1, height, width, filters])


@tf.custom_gradient
def multiply(x, kernel):
  """Matrix product [batch, in] x [in, out] -> [batch, out]."""

  def gradient(dy):
    # (kernel dy')' and not dy kernel': of a transposed 4096x4096 matrix TensorFlow 1.15 makes a product at a fifth the speed.
    return tf.transpose(tf.matmul(kernel, dy, transpose_b=True)), tf.matmul(x, dy, transpose_a=True)

  return tf.matmul(x, kernel), gradient


def weights_and_biases(kernel_shape, scale=1):
  """Creates a kernel and its biases in the current scope and returns their values.

  Kernels are He-normal (He et al. 2015, arXiv:1502.01852), times `scale`; biases are zero.
  """
  initializer = tf.initializers.variance_scaling(2 * scale**2, 'fan_in', 'truncated_normal')
  # Resource variables on either TensorFlow: a value that was read is a snapshot, which no later update changes.
  kernel = tf.get_variable('weights', kernel_shape, initializer=initializer, use_resource=True)
  biases = tf.get_variable('biases', kernel_shape[-1:], initializer=tf.zeros_initializer(), use_resource=True)
  # One read for both layer and weight decay: a kernel on another device crosses to a tower once.
  return kernel.value(), biases.value()


class NETWORK(object):
  """VGG19: logits, and with labels the loss.

  Args:
    image_batch: float32 [batch, 28, 28, 3], standardised; batch may be unknown.
    label_batch: one-hot float32 [batch, num_classes], or None where there are no labels: then there are no losses.
    keep_prob: probability that dropout keeps a unit of fc6 and fc7, in (0, 1]; it counts only when training.
    num_classes: width of the logits.
    is_training: whether dropout is on.

  Attributes:
    logits: float32 [batch, num_classes].
    cross_entropy: scalar, mean over the batch, in nats.
    weight_decay: scalar, 0.0004 times the l2_loss of the kernels of fc6, fc7 and the first convolution of each block.
    losses: scalar, cross_entropy + weight_decay.
    accuracy: scalar, the fraction of the batch whose largest logit is that of the label.
    layers: list of (name, output shape without batch, kernel shape).

  Variables are made by `tf.get_variable` in the current scope: conv1_1/weights, conv1_1/biases, ... fc8/biases.
  """

  def __init__(self, image_batch, label_batch, keep_prob, num_classes, is_training):
    self.image_batch = tf.convert_to_tensor(image_batch)
    self.label_batch = label_batch
    self.keep_prob = keep_prob if is_training else 1
    self.num_classes = num_classes
    self.layers = []
    self._decayed = []
    self.logits = self.inference()
    self.cross_entropy = self.weight_decay = self.losses = self.accuracy = None
    if label_batch is not None:
      self.losses = self.loss()

  def inference(self):
    """Builds the layers; returns the logits."""
    x = self.image_batch
    for block, widths in enumerate(BLOCKS, 1):
      for i, width in enumerate(widths, 1):
        stride = 2 if (block, i) == (1, 2) else 1
        x = self.conv(x, width, stride, 'conv%d_%d' % (block, i), decayed=i == 1)
      x = tf.nn.max_pool(x, [1, 3, 3, 1], [1, 2, 2, 1], 'SAME', name='pool%d' % block)
    x = tf.reshape(x, [-1, x.shape[1:].num_elements()])
    for i, width in enumerate(DENSE, 6):
      x = tf.nn.relu(self.dense(x, width, 'fc%d' % i, decayed=True))
      if self.keep_prob != 1:
        x = tf.nn.dropout(x, rate=1 - self.keep_prob)
    return self.dense(x, self.num_classes, 'fc8', decayed=False)

  def conv(self, x, width, stride, name, decayed):
    """3x3 SAME convolution + ReLU, [batch, h, w, in] -> [batch, h/stride, w/stride, width]."""
    height, breadth, channels = x.shape.as_list()[1:]
    # The mean fraction of the kernel's taps that fall on the image: He's formula counts all, and signals would fade.
    inside = (3 - 2 / height) * (3 - 2 / breadth) / 9
    with tf.variable_scope(name):
      kernel, biases = weights_and_biases([3, 3, channels, width], inside**-0.5)
      y = tf.nn.relu(tf.nn.bias_add(convolve(x, kernel, stride), biases))
    self._note(name, y, kernel, decayed)
    return y

  def dense(self, x, width, name, decayed):
    """Fully connected layer, [batch, in] -> [batch, width]."""
    with tf.variable_scope(name):
      kernel, biases = weights_and_biases([x.shape.as_list()[1], width])
      y = tf.nn.bias_add(multiply(x, kernel), biases)
    self._note(name, y, kernel, decayed)
    return y

  def _note(self, name, y, kernel, decayed):
    self.layers.append((name, y.shape.as_list()[1:], kernel.shape.as_list()))
    if decayed:
      self._decayed.append(kernel)

  def loss(self):
    """Mean cross-entropy plus weight decay, a scalar; keeps both parts, and the accuracy, as attributes."""
    right = tf.equal(tf.argmax(self.logits, 1), tf.argmax(self.label_batch, 1))
    self.accuracy = tf.reduce_mean(tf.cast(right, tf.float32))
    self.cross_entropy = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(labels=self.label_batch, logits=self.logits))
    self.weight_decay = WEIGHT_DECAY * tf.add_n([tf.nn.l2_loss(kernel) for kernel in self._decayed])
    return self.cross_entropy + self.weight_decay


def evaluation_network(image_batch, num_classes):
  """The network without labels and dropout, for images float32 [batch, 28, 28, 3]."""
  return NETWORK(image_batch, label_batch=None, keep_prob=1, num_classes=num_classes, is_training=False)


# ---------------------------------------------------------------- devices


def variable_sizes(num_classes):
  """Returns {name: bytes} of the network's variables."""
  with tf.Graph().as_default():
    evaluation_network(tf.placeholder(tf.float32, [None, 28, 28, 3]), num_classes)
    return {variable.op.name: variable.shape.num_elements() * variable.dtype.size for variable in tf.trainable_variables()}


def spread_variables(devices, num_classes):
  """Spreads the network's variables over `devices`: the largest first, each to the device with the fewest bytes.

  Returns {name: device}.
  """
  if len(devices) == 1:  # nothing to balance, so the sizes need not be known
    return collections.defaultdict(lambda: devices[0])
  load = dict.fromkeys(devices, 0)
  variable_devices = {}
  for name, size in sorted(variable_sizes(num_classes).items(), key=lambda item: (-item[1], item[0])):
    variable_devices[name] = min(devices, key=load.get)
    load[variable_devices[name]] += size
  return variable_devices


def tower_device(device, variable_devices):
  """Returns a device function: a variable goes where `variable_devices`, {name: device}, says, all else to `device`."""

  def choose(op):
    if op.device:
      return op.device  # pinned by an inner scope: the input, to the CPU
    return variable_devices[op.name] if op.type == 'VarHandleOp' else device

  return choose


def session_config(num_cpus=1):
  """Returns the ConfigProto of all sessions: `num_cpus` virtual CPU devices, and GPUs as far as there are any."""
  config = tf.ConfigProto(allow_soft_placement=True, device_count={'CPU': num_cpus})
  config.gpu_options.allow_growth = True  # val.py --watch and train.py share a GPU
  return config


# ---------------------------------------------------------------- checkpoints


def checkpoint_step(prefix):
  """The global step that a checkpoint's name ends in, or -1."""
  return int((re.findall(r'-(\d+)$', prefix) or [-1])[0])


def _is_whole(prefix):
  """Whether a checkpoint's index can be read and all its data files are there."""
  shards = glob.glob(prefix + '.data-?????-of-?????')
  if not os.path.isfile(prefix + '.index') or not shards or len(shards) != int(shards[0][-5:]):
    return False
  try:
    return bool(tf.train.NewCheckpointReader(prefix))
  except READ_ERRORS:
    return False


def refuse_wildcards(path):
  """Raises CheckpointError where a path has one of *?[]: TensorFlow takes checkpoint names for patterns, and finds none."""
  if set(path) & set('*?[]'):
    raise CheckpointError('TensorFlow cannot read checkpoints from %s: rename it without *, ?, [ and ]' % path)


def list_checkpoints(folder):
  """Prefixes of the whole checkpoints in a folder, by step; none is an empty list."""
  prefixes = [index[: -len('.index')] for index in glob.glob(os.path.join(folder, '*.index'))]
  return sorted(filter(_is_whole, prefixes), key=checkpoint_step)


def named_checkpoints(folder):
  """Names, without folder, of the newest and of all the checkpoints in a folder's `checkpoint` file; None and [] without."""
  try:
    state = tf.train.get_checkpoint_state(folder)
  except Exception:  # the file is damaged: what is raised depends on how, and on the TensorFlow
    state = None
  if not state:
    return None, []
  return os.path.basename(state.model_checkpoint_path), [os.path.basename(path) for path in state.all_model_checkpoint_paths]


def find_checkpoint(path):
  """The checkpoint that `path` means: a prefix, one of its files, or a folder, whose newest it is.

  In a folder the `checkpoint` file tells, by name alone, so that a folder may be moved; where what it names is gone
  or incomplete, the whole checkpoint of the highest step is taken, with a warning.

  Returns the prefix. Raises CheckpointError where there is none.
  """
  refuse_wildcards(path)
  if not os.path.isdir(path):
    prefix = re.sub(FILE_SUFFIX, '', path)
    if _is_whole(prefix):
      return prefix
    if os.path.exists(path) or os.path.exists(prefix + '.index'):
      raise CheckpointError('%s is no whole checkpoint: give a folder, or a prefix with .index and all its .data files' % path)
    raise CheckpointError('no checkpoint at %s: train one with train.py, or give another folder or prefix' % path)
  for _ in range(3):  # training may replace the only checkpoint while it is looked at
    newest, _ = named_checkpoints(path)
    if newest and _is_whole(os.path.join(path, newest)):
      return os.path.join(path, newest)
    whole = list_checkpoints(path)
    if whole and named_checkpoints(path)[0] == newest:
      if newest:
        tf.logging.warning('%s/checkpoint names %s, which is gone or incomplete; taking %s', path, newest, whole[-1])
      return whole[-1]
  raise CheckpointError('no checkpoint in the folder %s: train one with train.py, or give another folder' % path)


def resume_point(path):
  """The checkpoint at which training in `path` goes on, or None where there is nothing to go on from.

  Raises CheckpointError where checkpoints are there but none is whole, and for a file or prefix that is not there: a
  fresh start would hide that.
  """
  refuse_wildcards(path)
  if os.path.isdir(path) and (glob.glob(os.path.join(path, '*.index')) or os.path.exists(os.path.join(path, 'checkpoint'))):
    try:
      return find_checkpoint(path)
    except CheckpointError:
      raise CheckpointError('%s has checkpoints, but none is whole: to start anew, delete `checkpoint` and *.index there, '
                            'or give another --checkpoint_dir' % path)  # fmt: skip
  names_one = re.search(FILE_SUFFIX, path) or os.path.basename(path).startswith('model.ckpt')
  if os.path.isdir(path) or not (names_one or os.path.exists(path) or _is_whole(path)):
    return None
  return find_checkpoint(path)


def mark_training(folder, done):
  """Says by a file in `folder` whether training is done, so that `val.py --watch` knows that no checkpoint will follow."""
  path = os.path.join(folder, TRAINING_DONE)
  if done and not os.path.exists(path):
    open(path, 'w').close()
  elif not done and os.path.exists(path):
    os.remove(path)


def read_values(path, variables):
  """Values of `variables` in the checkpoint that `path` means (see find_checkpoint), their checksums verified.

  Training may delete the files just found: then the newer checkpoint is read.

  Returns the prefix and a list of arrays. Raises CheckpointError: none there, damaged, or of another network.
  """
  prefix = find_checkpoint(path)
  try:
    reader = tf.train.NewCheckpointReader(prefix)
    shapes = reader.get_variable_to_shape_map()
    names = [variable.op.name for variable in variables]
    values = [reader.get_tensor(name) for name in names if name in shapes]
  except READ_ERRORS as error:
    if find_checkpoint(path) != prefix:
      return read_values(path, variables)
    raise CheckpointError('%s is damaged (%s): delete it or give another one' % (prefix, error))
  for name, variable in zip(names, variables):
    if shapes.get(name) != variable.shape.as_list():
      raise CheckpointError('%s is not of this network: its %s has shape %s instead of %s'
                            % (prefix, name, shapes.get(name), variable.shape.as_list()))  # fmt: skip
    if not np.isfinite(values[names.index(name)]).all():
      raise CheckpointError('%s holds numbers that are not finite, in %s: give an older one' % (prefix, name))
  return prefix, values


def restore(session, variables, path):
  """Sets `variables` from a checkpoint, which is only read, once all values are known good; see read_values."""
  prefix, values = read_values(path, variables)
  for variable, value in zip(variables, values):
    variable.load(value, session)
  return prefix


class CheckpointWriter(object):
  """Saves all variables to `folder`; the newest `keep_checkpoints` stay, those of earlier runs among them."""

  def __init__(self, folder, keep_checkpoints):
    self.folder = folder
    self._saver = tf.train.Saver(max_to_keep=keep_checkpoints, save_relative_paths=True)
    earlier = [os.path.join(folder, name) for name in named_checkpoints(folder)[1]]
    self._saver.recover_last_checkpoints(earlier[-keep_checkpoints:])
    self._surplus = earlier[:-keep_checkpoints]  # deleted once there is a newer one
    os.makedirs(folder, exist_ok=True)
    self._remove_unfinished()

  def save(self, session, step):
    """Raises flags.Error with the file system's reason where it fails."""
    try:
      self._saver.save(session, os.path.join(self.folder, 'model.ckpt'), step, write_meta_graph=False)
    except (tf.errors.OpError, ValueError) as error:
      self._remove_unfinished()
      raise flags.Error('cannot save step %d in %s: %s' % (step, self.folder, reason_of(error)))
    while self._surplus:
      tf.train.remove_checkpoint(self._surplus.pop())

  def _remove_unfinished(self):
    """Deletes what a save that was killed or found the disk full left behind; it is of no use and may be 300 MB."""
    for path in glob.glob(os.path.join(self.folder, 'model.ckpt-*temp*')):  # _temp_ folders, 2.x: .tempstate files
      shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def reason_of(error):
  """Of TensorFlow's page about the graph only what the file system said, which stands before the node's name."""
  return re.search(r'([^\n]*?)\s*\[\[|$', str(error)).group(1) or error


# ---------------------------------------------------------------- run alone


def layer_table():
  """The layers as text, with totals."""
  import pandas as pd

  with tf.Graph().as_default():
    layers = evaluation_network(tf.placeholder(tf.float32, [None, 28, 28, 3]), 10).layers
  table = pd.DataFrame(columns=['layer', 'output', 'parameters', 'multiply-adds'])
  for name, output, kernel in layers:
    multiply_adds = int(np.prod(kernel) * np.prod(output[:-1]))  # a kernel for each output pixel, padding included
    table.loc[len(table)] = [name, 'x'.join(map(str, output)), np.prod(kernel) + kernel[-1], multiply_adds]
  table.loc[len(table)] = ['total', '', table['parameters'].sum(), table['multiply-adds'].sum()]
  return table.to_string(index=False, formatters=dict.fromkeys(['parameters', 'multiply-adds'], '{:,}'.format))


def main(_):
  print(layer_table())


if __name__ == '__main__':
  data_input.run(main, flags.FlagValues(), __doc__)
