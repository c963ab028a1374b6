"""Compares the scripts' speed with that of other ways to do the same work, on the TensorFlow that it runs under.

  python tests/benchmarks/run.py                    everything, about 40 minutes on 2 cores
  python tests/benchmarks/run.py step input         only these
  python tests/benchmarks/run.py --repeats 1 val    a quick look

  step      training step, constant input, batch 128   against the same network in plain tf.nn.conv2d
  keras     the same                                   against Keras 3, where it is installed: with TensorFlow 2.x
  torch     the same                                   against PyTorch, where it is installed
  input     training queue                             against one image at a time, tf.data, torch's DataLoader
  train     train.py, run as a command                 against its bare step, constant input
  towers    4 towers of 32 on 4 virtual CPU devices    against 1 tower of 128
  cluster   2 workers of 64 on this machine            against train.py alone, batch 128, on the same cores
  hosts     2 and 4 hosts on links of 200 Mbit/s       against what the links allow; needs root, ip and tc
  val       val.py's pass over the test set            against the bare forward pass, constant input
  predict   test_tfrecords.py's pass over the same     against the bare forward pass, constant input
  convert   toTFRecords.py's conversion of 10,000 PNG  against a plain loop of Pillow reads

Prints a table to stdout: images/s of ours and of the reference, medians of --repeats rounds, and their ratio. Each side is
a process of its own; they are measured in turn, and stand still meanwhile. Left out on both sides: start-up, graph and
session set-up, loading the checkpoint; of train.py also its first step and the saves, one in 400 steps.
"""

import collections
import contextlib
import glob
import importlib.util
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types

ENVIRONMENT = dict(os.environ)  # of the processes to start, before data_input adds its own settings
HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, HOME)
# The imports follow the path, and data_input leads: it imports TensorFlow quietly.
from data_input import CLASSES, CROP_SIZE, IMAGE_SIZE, RECORD_BYTES, TEST_FILES, TRAIN_FILES  # noqa: E402
from data_input import data_input, decode, find_files, run, synthesise  # noqa: E402

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import network  # noqa: E402
import test_tfrecords  # noqa: E402
import toTFRecords  # noqa: E402
import train  # noqa: E402
import val  # noqa: E402

BATCH, NUM_CLASSES, SHAPE = 128, len(CLASSES), [CROP_SIZE, CROP_SIZE, 3]
KEEP_PROB, MOMENTUM, RATE = 0.5, 0.9, 0.001  # the rate is small: there is only noise to learn
TRAIN_STEPS = 40  # that train.py is measured for

flags = tf.app.flags
FLAGS = flags.FlagValues()
flags.DEFINE_string('data_dir', 'data', 'CIFAR-10; where there is no such folder, a synthetic set is made', flag_values=FLAGS)
flags.DEFINE_integer('repeats', 5, 'rounds of which the median is taken', 1, flag_values=FLAGS)
flags.DEFINE_integer('piece_bytes', train.PIECE_BYTES, 'of `hosts`: pieces of a gradient', 4, flag_values=FLAGS)
flags.DEFINE_string('worker', None, 'of a process that the benchmark starts: the side that it is', flag_values=FLAGS)
flags.DEFINE_string('scratch', None, 'of such a process: the folder for temporary files', flag_values=FLAGS)


def rate(work, images, seconds=5):
  """images/s of `work`, which handles `images` a call, over `seconds` or at least one call.

  A second or one call before is not counted: it warms up, and uses up what queues have ready.
  """

  def repeat(seconds):
    start, calls = time.time(), 0
    while not calls or time.time() < start + seconds:
      work()
      calls += 1
    return calls * images / (time.time() - start)

  repeat(1)
  return repeat(seconds)


def timed(work):
  """images/s of one call of `work`, which returns how many it handled."""
  start = time.time()
  return work() / (time.time() - start)


def records(names):
  """The raw records of files of the data set, uint8 [records, 3073]."""
  paths, _ = find_files(FLAGS.data_dir, names, NUM_CLASSES)
  return np.concatenate([np.fromfile(path, np.uint8) for path in paths]).reshape(-1, RECORD_BYTES)


# ---------------------------------------------------------------- training step
# From here on, a function that BENCHMARKS names sets up one side and returns a function that measures a round of it.


def noise(batch_size):
  """Constant input: images, float32 [batch, 28, 28, 3], and one-hot labels, float32 [batch, 10]."""
  draw = np.random.RandomState(0)
  images = draw.standard_normal([batch_size] + SHAPE).astype(np.float32)
  return images, np.eye(NUM_CLASSES, dtype=np.float32)[draw.randint(NUM_CLASSES, size=batch_size)]


def our_step(devices, batch_size, seconds=5):
  """train.py's own graph, on constant input."""
  data = types.SimpleNamespace(batch_size=batch_size, num_classes=NUM_CLASSES, num_records=50000, queue_fill=1.0,
                               next_batch=lambda: map(tf.constant, noise(batch_size)))  # fmt: skip
  with tf.Graph().as_default():
    model = train.build(data, devices, 100, RATE, MOMENTUM, KEEP_PROB)
    session = tf.Session(config=network.session_config(len(devices)))
    session.run(tf.global_variables_initializer())
  return lambda: rate(lambda: session.run(model.train_op), len(devices) * batch_size, seconds)


def plain_step():
  network.multiply = tf.matmul
  network.convolve = lambda images, kernel, stride=1: tf.nn.conv2d(images, kernel, [1, stride, stride, 1], 'SAME')
  with tf.Graph().as_default():
    losses = network.NETWORK(*map(tf.constant, noise(BATCH)), KEEP_PROB, NUM_CLASSES, True).losses
    step = tf.train.MomentumOptimizer(RATE, MOMENTUM).minimize(losses)
    session = tf.Session()
    session.run(tf.global_variables_initializer())
  return lambda: rate(lambda: session.run(step), BATCH)


def convolutions():
  """Of each convolution: its width and stride, whether its kernel is decayed, and whether a pool follows."""
  for block, widths in enumerate(network.BLOCKS, 1):
    for i, width in enumerate(widths, 1):
      yield width, 2 if (block, i) == (1, 2) else 1, i == 1, i == len(widths)


def keras_step():
  import keras
  from keras import layers

  decay = keras.regularizers.L2(network.WEIGHT_DECAY / 2)  # Keras does not halve the sum of squares, l2_loss does
  like = {'activation': 'relu', 'kernel_initializer': 'he_normal'}
  model = keras.Sequential([keras.Input(SHAPE)])
  for width, stride, decayed, pooled in convolutions():
    model.add(layers.Conv2D(width, 3, stride, 'same', kernel_regularizer=decay if decayed else None, **like))
    if pooled:
      model.add(layers.MaxPooling2D(3, 2, 'same'))
  model.add(layers.Flatten())
  for width in network.DENSE:
    model.add(layers.Dense(width, kernel_regularizer=decay, **like))
    model.add(layers.Dropout(1 - KEEP_PROB))
  model.add(layers.Dense(NUM_CLASSES, kernel_initializer='he_normal'))
  model.compile(keras.optimizers.SGD(RATE, MOMENTUM), keras.losses.CategoricalCrossentropy(from_logits=True))
  batch = noise(BATCH)
  # Its steps are those of fit, whose end can wait for seconds until tf.data lets go: a long epoch hides that, no short one.
  return lambda: rate(lambda: model.train_on_batch(*batch), BATCH)


def torch_network():
  """The network in PyTorch, and its decayed kernels."""
  from torch import nn

  model, decayed, channels = nn.Sequential(), [], 3
  for width, stride, is_decayed, pooled in convolutions():
    model.extend([nn.Conv2d(channels, width, 3, stride, padding=1), nn.ReLU()])
    decayed += [model[-2].weight] if is_decayed else []
    model.extend([nn.MaxPool2d(3, 2, padding=1)] if pooled else [])
    channels = width
  model.append(nn.Flatten())
  for width in network.DENSE:
    model.extend([nn.Linear(channels, width), nn.ReLU(), nn.Dropout(1 - KEEP_PROB)])
    decayed.append(model[-3].weight)
    channels = width
  model.append(nn.Linear(channels, NUM_CLASSES))
  for parameter in model.parameters():
    (nn.init.kaiming_normal_ if parameter.ndim > 1 else nn.init.zeros_)(parameter)
  return model, decayed


def torch_step():
  import torch

  model, decayed = torch_network()
  rest = [parameter for parameter in model.parameters() if parameter not in set(decayed)]
  groups = [{'params': decayed, 'weight_decay': network.WEIGHT_DECAY}, {'params': rest}]
  optimizer = torch.optim.SGD(groups, RATE, MOMENTUM, fused=True)  # the fastest of its kinds here
  images, labels = map(torch.from_numpy, noise(BATCH))
  images = images.permute(0, 3, 1, 2).contiguous()

  def step():
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()

  return lambda: rate(step, BATCH)


# ---------------------------------------------------------------- training input


def queue_rate(build):
  """Batches are taken with session.run of the op that makes `build()`'s first tensor: none is copied to numpy."""
  with tf.Graph().as_default(), tf.device('/cpu:0'):
    fetch, session = build()[0].op, tf.Session()
    tf.train.start_queue_runners(session, tf.train.Coordinator())
  return lambda: rate(lambda: session.run(fetch), BATCH)


def our_input():
  data = data_input(FLAGS.data_dir, BATCH, NUM_CLASSES, True)
  return data.image_batch, data.label_batch


def augment_one(record):
  """A raw record -> augmented image, float32 [28, 28, 3], and one-hot label, with TensorFlow's ops for one image."""
  record = tf.decode_raw(record, tf.uint8)
  image = tf.transpose(tf.reshape(record[1:RECORD_BYTES], [3, IMAGE_SIZE, IMAGE_SIZE]), [1, 2, 0])
  image = tf.random_crop(tf.cast(image, tf.float32), SHAPE)
  image = tf.image.random_flip_left_right(image)
  image = tf.image.random_brightness(image, 63)
  image = tf.image.random_contrast(image, 0.2, 1.8)
  return tf.image.per_image_standardization(image), tf.one_hot(tf.cast(record[0], tf.int32), NUM_CLASSES)


def article_input():
  paths, _ = find_files(FLAGS.data_dir, TRAIN_FILES, NUM_CLASSES)
  _, record = tf.FixedLengthRecordReader(RECORD_BYTES).read(tf.train.string_input_producer(paths))
  return tf.train.shuffle_batch(augment_one(record), BATCH, num_threads=16, capacity=20400, min_after_dequeue=20000)


def tf_data_input():
  paths, _ = find_files(FLAGS.data_dir, TRAIN_FILES, NUM_CLASSES)
  autotune = tf.data.experimental.AUTOTUNE
  samples = tf.data.FixedLengthRecordDataset(paths, RECORD_BYTES).shuffle(20000).repeat().map(augment_one, autotune)
  return tf.data.make_one_shot_iterator(samples.batch(BATCH, drop_remainder=True).prefetch(autotune)).get_next()


class TorchRecords(object):
  """The same for torch: a dataset of records in memory, each augmented by numpy when it is taken."""

  def __init__(self):
    content = records(TRAIN_FILES)
    self._labels, self._images = content[:, 0].astype(np.int64), content[:, 1:].reshape(-1, 3, IMAGE_SIZE, IMAGE_SIZE)

  def __len__(self):
    return len(self._labels)

  def __getitem__(self, i):
    y, x = np.random.randint(IMAGE_SIZE - CROP_SIZE + 1, size=2)
    image = self._images[i, :, y : y + CROP_SIZE, x : x + CROP_SIZE].astype(np.float32)
    if np.random.randint(2):
      image = image[:, :, ::-1]
    image = image + np.random.uniform(-63, 63)
    mean = image.mean((1, 2), keepdims=True)
    image = (image - mean) * np.random.uniform(0.2, 1.8) + mean
    return (image - image.mean()) / max(image.std(), image.size**-0.5), self._labels[i]


def torch_input():
  from torch.utils.data import DataLoader

  loader = DataLoader(TorchRecords(), BATCH, shuffle=True, num_workers=2, drop_last=True, persistent_workers=True)
  batches = itertools.chain.from_iterable(itertools.repeat(loader))
  return lambda: rate(lambda: next(batches), BATCH)


# ---------------------------------------------------------------- the scripts


def train_command(batch_size):
  return [sys.executable, 'train.py', '--num_gpus=1', '--batch_size=%d' % batch_size, '--max_steps=%d' % (TRAIN_STEPS + 1),
          '--data_dir', FLAGS.data_dir, '--checkpoint_dir']  # fmt: skip


def rate_of_training(folder):
  """images/s between the first and the last point that train.py wrote for TensorBoard."""
  events = tf.train.summary_iterator(glob.glob(os.path.join(folder, 'events*'))[0])
  points = [event for event in events if 'images_per_second' in [value.tag for value in event.summary.value]]
  return (points[-1].step - points[0].step) * BATCH / (points[-1].wall_time - points[0].wall_time)


def our_train():
  def measure():
    with tempfile.TemporaryDirectory(dir=FLAGS.scratch) as folder:
      subprocess.check_call(train_command(BATCH) + [folder], cwd=HOME, env=ENVIRONMENT)
      return rate_of_training(folder)

  return measure


def tf_configs(addresses):
  """TF_CONFIG of each of the workers at `addresses`."""
  return [json.dumps({'cluster': {'worker': addresses}, 'task': {'type': 'worker', 'index': i}}) for i in range(len(addresses))]


def our_cluster(count=2):
  def measure():
    with tempfile.TemporaryDirectory(dir=FLAGS.scratch) as folder, contextlib.ExitStack() as sockets:
      listeners = [sockets.enter_context(socket.socket()) for _ in range(count)]
      for listener in listeners:
        listener.bind(('127.0.0.1', 0))
      addresses = ['127.0.0.1:%d' % listener.getsockname()[1] for listener in listeners]
      sockets.close()
      workers = [subprocess.Popen(train_command(BATCH // count) + [folder], cwd=HOME, env=dict(ENVIRONMENT, TF_CONFIG=config))
                 for config in tf_configs(addresses)]  # fmt: skip
      assert [worker.wait() for worker in workers] == [0] * count
      return rate_of_training(folder)

  return measure


# ---------------------------------------------------------------- hosts

HOST_STEPS = 4  # that are measured
HOST_BATCH = 16  # small: what is measured is the network
LINK_MBITS = 200  # of each host, each way
# train.py with another size of the pieces that gradients travel in.
TRAIN_WITH_PIECES = (
  'import sys, data_input, train; train.PIECE_BYTES = int(sys.argv.pop(1)); data_input.run(train.main, train.FLAGS, "")'
)


@contextlib.contextmanager
def linked_hosts(count):
  """Network namespaces host0, host1, ... with the addresses 10.99.0.1, ..., each behind a link of LINK_MBITS."""
  limit = ['root', 'tbf', 'rate', '%dmbit' % LINK_MBITS, 'burst', '256kb', 'latency', '400ms']

  def run(words, *more):
    subprocess.check_call(words.split() + list(more))

  try:
    run('ip link add hosts type bridge')
    run('ip link set hosts up')
    for i in range(count):
      run('ip netns add host%d' % i)
      run('ip link add link%d type veth peer name eth netns host%d' % (i, i))
      run('ip link set link%d master hosts up' % i)
      run('ip -n host%d addr add 10.99.0.%d/24 dev eth' % (i, i + 1))
      run('ip -n host%d link set eth up' % i)
      run('ip -n host%d link set lo up' % i)
      run('tc qdisc add dev link%d' % i, *limit)
      run('ip netns exec host%d tc qdisc add dev eth' % i, *limit)
    yield ['10.99.0.%d:2222' % (i + 1) for i in range(count)]
  finally:
    for i in range(count):
      subprocess.call(['ip', 'link', 'del', 'link%d' % i], stderr=subprocess.DEVNULL)
      subprocess.call(['ip', 'netns', 'del', 'host%d' % i], stderr=subprocess.DEVNULL)
    subprocess.call(['ip', 'link', 'del', 'hosts'], stderr=subprocess.DEVNULL)


def bytes_of_first_host():
  """Received and sent."""
  command = ['ip', 'netns', 'exec', 'host0', 'cat'] + ['/sys/class/net/eth/statistics/%s_bytes' % way for way in ('rx', 'tx')]
  return np.array(subprocess.check_output(command).split(), float)


def step_of_hosts(count):
  """Seconds a step of train.py on `count` hosts, the bytes a host receives and sends in it, and the memory it had at most."""
  with linked_hosts(count) as addresses, tempfile.TemporaryDirectory(dir=FLAGS.scratch) as folder:
    workers = []
    for i, config in enumerate(tf_configs(addresses)):
      command = ['ip', 'netns', 'exec', 'host%d' % i, sys.executable, '-c', TRAIN_WITH_PIECES, str(FLAGS.piece_bytes)]
      command += ['--data_dir', FLAGS.data_dir, '--checkpoint_dir', folder, '--batch_size', str(HOST_BATCH), '--max_steps',
                  str(HOST_STEPS + 1)]  # fmt: skip
      workers.append(subprocess.Popen(command, cwd=HOME, env=dict(ENVIRONMENT, TF_CONFIG=config), stderr=subprocess.PIPE,
                                      universal_newlines=True))  # fmt: skip
    steps = re.compile(r'step (1|%d)/' % (HOST_STEPS + 1))
    moments = [(time.time(), bytes_of_first_host()) for line in workers[0].stderr if steps.match(line)]
    memory = os.wait4(workers[0].pid, 0)[2].ru_maxrss * 1024
    for worker in workers[1:]:
      worker.communicate()
    (begin, before), (end, after) = moments
    return (end - begin) / HOST_STEPS, (after - before) / HOST_STEPS, memory


def hosts(scratch):
  """Yields rows: what, measured, by arithmetic, ratio."""
  FLAGS.scratch = scratch
  try:
    alone, _, memory_alone = step_of_hosts(1)
  except (OSError, subprocess.CalledProcessError) as error:
    yield 'hosts: not measured, needs root, ip and tc (%s)' % error, '-', '-', ''
    return
  yield 'hosts: 1, seconds a step', alone, '-', ''
  gradients = sum(network.variable_sizes(NUM_CLASSES).values())
  for count in (2, 4):
    seconds, moved, memory = step_of_hosts(count)
    expected = 2 * (count - 1) / count * gradients
    on_the_link = expected * 8 / LINK_MBITS / 1e6
    for way, measured in zip(('received', 'sent'), moved):
      yield 'hosts: %d, MB a host %s a step' % (count, way), measured / 1e6, expected / 1e6, measured / expected
    # The hosts share the cores of this machine.
    beyond = seconds - count * alone
    yield 'hosts: %d, seconds a step (%.2f) less computing' % (count, seconds), beyond, on_the_link, beyond / on_the_link
    yield 'hosts: %d, GB of memory, beside one alone' % count, memory / 1e9, memory_alone / 1e9, memory / memory_alone


def bare_forward():
  with tf.Graph().as_default() as graph:
    logits = network.evaluation_network(tf.constant(noise(BATCH)[0]), NUM_CLASSES).logits
    initialize = tf.global_variables_initializer()

  def measure():
    # A new session each time, as the scripts have one a checkpoint: that its first step is slower counts on both sides.
    with tf.Session(graph=graph) as session:
      session.run(initialize)
      return timed(lambda: BATCH * len([session.run(logits) for _ in range(10000 // BATCH)]))

  return measure


def new_checkpoint():
  """Makes a checkpoint of untrained weights; returns its prefix."""
  with tf.Graph().as_default(), tf.Session() as session:
    network.evaluation_network(tf.placeholder(tf.float32, [None] + SHAPE), NUM_CLASSES)
    session.run(tf.global_variables_initializer())
    return tf.train.Saver().save(session, os.path.join(FLAGS.scratch, 'model.ckpt'), 0)


def timed_from_restore(work, restore=network.restore):
  """As `timed`, but from when network.restore, which `work` calls, has returned."""
  restored = []

  def noting(*args):
    prefix = restore(*args)
    restored.append(time.time())
    return prefix

  network.restore = noting
  return work() / (time.time() - restored[0])


def our_validation():
  checkpoint, graph = new_checkpoint(), tf.Graph()
  with graph.as_default():
    validate = val.Validation(FLAGS.data_dir, BATCH, val.FLAGS['num_threads'].default)

  def measure():
    with graph.as_default():
      return timed_from_restore(lambda: validate(checkpoint)['total'])

  return measure


def png_folder():
  """Writes the test set as PNG files; returns their folder."""
  folder = os.path.join(FLAGS.scratch, 'png')
  os.makedirs(folder, exist_ok=True)
  with tf.Graph().as_default(), tf.Session() as session:
    images = session.run(decode([record.tobytes() for record in records(TEST_FILES)])[0])
    pixels = tf.placeholder(tf.uint8, [IMAGE_SIZE, IMAGE_SIZE, 3])
    encode = session.make_callable(tf.image.encode_png(pixels), [pixels])
    for i, image in enumerate(images, 1):
      with open(os.path.join(folder, '%d.png' % i), 'wb') as out:
        out.write(encode(image))
  return folder


def our_conversion():
  folder, output = png_folder(), os.path.join(FLAGS.scratch, 'test.tfrecords')
  threads = toTFRecords.FLAGS['num_threads'].default
  return lambda: timed(lambda: toTFRecords.convert(folder, toTFRecords.list_images(folder)[0], output, threads, False)[0])


def pillow_reads():
  from PIL import Image

  folder = png_folder()

  def read():
    pixels = []
    for name in sorted(os.listdir(folder)):
      with Image.open(os.path.join(folder, name)) as image:
        pixels.append(np.asarray(image.convert('RGB')))
    return len(np.stack(pixels))

  return lambda: timed(read)


def our_prediction():
  our_conversion()()
  path, checkpoint = os.path.join(FLAGS.scratch, 'test.tfrecords'), new_checkpoint()
  count, threads = test_tfrecords.check_tfrecords(path), test_tfrecords.FLAGS['num_threads'].default

  def work():
    test_tfrecords.to_csv(*test_tfrecords.predict(path, count, checkpoint, BATCH, threads), False)
    return test_tfrecords.check_tfrecords(path)  # comes first in the script; here, it is timed

  return lambda: timed_from_restore(work)


# ---------------------------------------------------------------- the run

Side = collections.namedtuple('Side', 'what set_up module onednn')
Side.__new__.__defaults__ = None, '1'  # the module that must be installed; TF_ENABLE_ONEDNN_OPTS

STEP = Side('training step', lambda: our_step(train.tower_devices(1), BATCH))
# oneDNN is read when TensorFlow is imported, and TensorFlow 1.15 has no such switch.
PLAIN = [Side('plain tf.nn.conv2d', plain_step)]
if not tf.__version__.startswith('1.'):
  PLAIN = [Side('plain tf.nn.conv2d, oneDNN off', plain_step, onednn='0'), Side('the same, oneDNN on', plain_step)]
FORWARD = Side('bare forward pass', bare_forward)

BENCHMARKS = {  # ours, then what it is compared with
  'step': [STEP] + PLAIN,
  'keras': [STEP, Side('Keras 3 train_on_batch, oneDNN on', keras_step, 'keras')],
  'torch': [STEP, Side('PyTorch', torch_step, 'torch')],
  'input': [
    Side('training queue', lambda: queue_rate(our_input)),
    Side('one image at a time, 16 threads', lambda: queue_rate(article_input)),
    Side('tf.data, AUTOTUNE', lambda: queue_rate(tf_data_input)),
    Side('torch DataLoader, 2 workers', torch_input, 'torch'),
  ],
  'train': [Side('train.py', our_train), Side('its bare step', lambda: our_step(train.tower_devices(1), BATCH, 20))],
  'towers': [
    Side('4 towers of 32', lambda: our_step(['/cpu:%d' % i for i in range(4)], BATCH // 4)),
    Side('1 of 128', lambda: our_step(['/cpu:0'], BATCH)),
  ],
  'cluster': [Side('2 workers of 64', our_cluster), Side('train.py alone', our_train)],
  'val': [Side('val.py', our_validation), FORWARD],
  'predict': [Side('test_tfrecords.py', our_prediction), FORWARD],
  'convert': [Side('toTFRecords.py', our_conversion), Side('Pillow reads', pillow_reads, 'PIL')],
}
ALL = list(BENCHMARKS) + ['hosts']
ROW = '%-60s %10s %10s  %s'


class Worker(object):
  """One side in a process of its own, which stands still except in `measure`."""

  def __init__(self, name, side, scratch):
    command = [sys.executable, os.path.abspath(__file__), '--worker', '%s.%d' % (name, BENCHMARKS[name].index(side)),
               '--scratch', scratch, '--data_dir', FLAGS.data_dir]  # fmt: skip
    self._process = subprocess.Popen(command, env=dict(ENVIRONMENT, TF_ENABLE_ONEDNN_OPTS=side.onednn), preexec_fn=os.setpgrp,
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, universal_newlines=True)  # fmt: skip
    self._await_line()

  def _await_line(self):
    line = self._process.stdout.readline()
    if not line:
      raise flags.Error('a process of the benchmark ended; it says why above')
    os.killpg(self._process.pid, signal.SIGSTOP)  # and the processes that it has started
    return line

  def measure(self):
    os.killpg(self._process.pid, signal.SIGCONT)
    print(file=self._process.stdin, flush=True)
    return float(self._await_line())

  def close(self):
    os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()


def serve():
  """Is a worker: prints a line when it is ready, then images/s for each line that it reads."""
  replies = os.fdopen(os.dup(1), 'w', 1)
  os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the scripts print
  name, index = FLAGS.worker.split('.')
  measure = BENCHMARKS[name][int(index)].set_up()
  print('ready', file=replies)
  for _ in sys.stdin:
    print(measure(), file=replies)


def alternate(name, sides, scratch):
  """Measures `sides` in turn, --repeats times; returns the median images/s of each."""
  with contextlib.ExitStack() as stack:
    workers = [stack.enter_context(contextlib.closing(Worker(name, side, scratch))) for side in sides]
    rounds = []
    for _ in range(FLAGS.repeats):
      rounds.append([worker.measure() for worker in workers])
      print(name, *map('{:.1f}'.format, rounds[-1]), file=sys.stderr)
  return np.median(rounds, 0)


def compare(name, scratch):
  """Runs a benchmark; yields rows: what, ours, reference, ratio."""
  ours, *references = BENCHMARKS[name]
  able = [side for side in references if not side.module or importlib.util.find_spec(side.module)]
  medians = dict(zip([ours] + able, alternate(name, [ours] + able, scratch))) if able else {}
  for side in references:
    values = '-', '-', '%s is not installed' % side.module
    if side in able:
      values = medians[ours], medians[side], medians[ours] / medians[side]
    yield ('%s: %s / %s' % (name, ours.what, side.what), *values)


def main(names):
  if FLAGS.worker:
    return serve()
  for name in names:
    if name not in ALL:
      raise flags.Error("there is no benchmark '%s': choose from %s" % (name, ', '.join(ALL)))
  for number in (signal.SIGINT, signal.SIGTERM):  # unwinds, so that the processes and their files go
    signal.signal(number, lambda number, _: sys.exit(128 + number))
  with tempfile.TemporaryDirectory() as scratch:
    FLAGS.data_dir = os.path.abspath(FLAGS.data_dir)
    if not os.path.exists(FLAGS.data_dir):
      print('no folder %s: a synthetic set instead' % FLAGS.data_dir, file=sys.stderr)
      FLAGS.data_dir = os.path.join(scratch, 'data')
      synthesise(FLAGS.data_dir, 10000)
    print(ROW % ('images/s, TensorFlow %s, %d cores' % (tf.__version__, os.cpu_count()), 'ours', 'reference', ' ratio'))
    for name in names or ALL:
      for row in hosts(scratch) if name == 'hosts' else compare(name, scratch):
        what, *numbers = row
        numbers = [number if isinstance(number, str) else '%.2f' % number for number in numbers]
        print(ROW % (what, *numbers), flush=True)


if __name__ == '__main__':
  run(main, FLAGS, __doc__, max_words=99)
