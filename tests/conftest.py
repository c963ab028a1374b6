"""What the tests share: small data made on the spot, and the scripts run as a user runs them."""

import collections
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import data_input  # noqa: E402, and before TensorFlow: it sets up its messages

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import network  # noqa: E402
import train  # noqa: E402

tf.get_logger().addFilter(lambda record: 'deprecated' not in record.getMessage())

# What no run may print: TensorFlow's chatter, queue errors at the end, a traceback.
CHATTER = (
  'deprecated',
  'Instructions for updating',
  'Enqueue operation',
  'ERROR',
  'Traceback',
  'tensorflow/',
  'I0000',
  'E0000',
)


TIMEOUT = 180  # seconds after which a process counts as hung; on a busy machine a mere start may take 20


def command(name, *arguments):
  return [sys.executable, os.path.join(ROOT, name)] + [str(argument) for argument in arguments]


def run_script(script, *arguments, status=0, **options):
  """Runs a script as a command; its exit status must be `status`. Returns the completed process, outputs as text."""
  options.setdefault('stdout', subprocess.PIPE)
  environ = dict(os.environ, PYTHONIOENCODING='utf-8')
  for name in ('TF_CPP_MIN_LOG_LEVEL', 'PYTHONUNBUFFERED'):  # the first conftest's import has set, the second hides a full disk
    environ.pop(name, None)
  environ.update(options.pop('env', {}))
  done = subprocess.run(
    command(script, *arguments), stderr=subprocess.PIPE, encoding='utf-8', timeout=TIMEOUT, env=environ, **options
  )
  assert done.returncode == status, done.stderr
  return done


def clean_error(name, *arguments, **options):
  """Runs a script that must end as a user's mistake does: status 1, one error line, nothing on stdout. Returns the line."""
  done = run_script(name, *arguments, status=1, **options)
  lines = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
  assert len(lines) == 1 and 'Traceback' not in done.stderr, done.stderr
  assert not done.stdout
  return lines[0]


def mistake(script, *arguments):
  """What the module `script` says of a wrong command line, in this process: the text that `run` makes an error line of."""
  try:
    script.FLAGS.set_gnu_getopt(True)
    with pytest.raises(data_input.flags.Error) as raised:
      script.main(script.FLAGS([script.__name__] + [str(argument) for argument in arguments])[1:])
  finally:
    for name in script.FLAGS:
      script.FLAGS[name].unparse()
  return str(raised.value)


def assert_readable(stderr):
  for word in CHATTER:
    assert word not in stderr, stderr


def write_records(path, labels, pixels):
  """A .bin file of the given labels [n] and pixels, uint8, [n, 3072] or a number for each record."""
  pixels = np.broadcast_to(np.reshape(pixels, [len(labels), -1]), [len(labels), 3072])
  np.hstack([np.reshape(labels, [-1, 1]), pixels]).astype(np.uint8).tofile(str(path))


def random_records(path, count, seed=0):
  """A .bin file of `count` random images with labels 0..9 in turn; returns labels and uint8 images [count, 32, 32, 3]."""
  labels, pixels = np.arange(count) % 10, np.random.RandomState(seed).randint(0, 256, [count, 3072])
  write_records(path, labels, pixels)
  return labels, pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).astype(np.uint8)


def write_small_data(folder, per_file=40, test=40):
  """Six files; record i has label i % 10 and all pixels i % 256."""
  for i, name in enumerate(data_input.TRAIN_FILES):
    index = np.arange(per_file) + i * per_file
    write_records(os.path.join(str(folder), name), index % 10, index % 256)
  random_records(os.path.join(str(folder), 'test_batch.bin'), test)


@pytest.fixture
def small_data(tmp_path):
  folder = tmp_path / 'small data'
  folder.mkdir()
  write_small_data(folder)
  return folder


@pytest.fixture(scope='session')
def synthetic(tmp_path_factory):
  """The folder of a --synthetic data set."""
  folder = tmp_path_factory.mktemp('synthetic')
  data_input.synthesise(str(folder), records=200)
  return str(folder)


@pytest.fixture(scope='session')
def wide_awake(tmp_path_factory):
  """A folder with checkpoint 7 of a network that tells images apart: scaled so that signals reach the last layer."""
  folder = str(tmp_path_factory.mktemp('wide_awake'))
  draw = np.random.RandomState(3)
  with tf.Graph().as_default(), tf.Session() as session:
    images = draw.normal(size=[64, 28, 28, 3])
    logits = network.NETWORK(images.astype(np.float32), None, 1, 10, False).logits
    for variable in tf.trainable_variables():
      # Only 4 of 9 taps meet a pixel on conv4's maps and one on conv5's, so their He-normal signals fade.
      shape, gain = variable.shape.as_list(), {'conv4': 1.5, 'conv5': 3}.get(variable.op.name[:5], 1)
      kernel = len(shape) > 1
      variable.load(
        draw.normal(scale=gain * np.sqrt(2 / np.prod(shape[:-1])), size=shape) if kernel else np.zeros(shape), session
      )
    # The last variable, fc8/biases, centres the logits, so that no class is the answer to all.
    variable.load(-session.run(logits).mean(0), session)
    tf.train.Saver().save(session, os.path.join(folder, 'model.ckpt'), 7, write_meta_graph=False)
  return folder


@pytest.fixture(scope='session')
def two_steps(tmp_path_factory):
  """A folder that train.py left after two steps of two towers."""
  data, folder = tmp_path_factory.mktemp('data'), str(tmp_path_factory.mktemp('two steps'))
  write_small_data(data)
  done = run_script('train.py', '--data_dir', data, '--checkpoint_dir', folder, '--num_gpus', 2, '--batch_size', 4,
                    '--max_steps', 2)  # fmt: skip
  assert_readable(done.stderr)
  return folder


class FixedData(object):
  """The same 128 records each step, dealt out to the towers in turn: what data_input is to train.build."""

  num_classes, num_records = 10, 1000

  def __init__(self, batch_size):
    draw = np.random.RandomState(0)
    self._images = draw.normal(size=[128, 28, 28, 3]).astype(np.float32)
    self._labels = np.eye(10, dtype=np.float32)[draw.randint(0, 10, 128)]
    self.batch_size, self.queue_fill, self._next = batch_size, tf.constant(1.0), 0

  def next_batch(self):
    start, self._next = self._next, self._next + self.batch_size
    return tf.constant(self._images[start : self._next]), tf.constant(self._labels[start : self._next])


Update = collections.namedtuple('Update', 'values report start')


def after_one_step(num_towers, start=None):
  """One update of `num_towers` towers that share 128 records.

  Returns an Update: every variable after it, the report, and the folder `start`, if given, with a checkpoint of those before it.
  """
  devices = ['/cpu:%d' % i for i in range(num_towers)]
  with tf.Graph().as_default(), tf.Session(config=network.session_config(num_towers)) as session:
    model = train.build(FixedData(128 // num_towers), devices, 1, 0.1, 0.9, keep_prob=1)
    session.run(tf.global_variables_initializer())
    draw = np.random.RandomState(1)
    for variable in tf.trainable_variables():
      # Biases keep every ReLU open. A product rounds otherwise for another batch size, by 1e-7; where that shuts a
      # single ReLU out of a million near zero, gradients differ by up to 2e-3, on whatever towers.
      shape = variable.shape.as_list()
      value = draw.normal(scale=0.3 / np.sqrt(np.prod(shape[:-1])), size=shape) if len(shape) > 1 else np.ones(shape)
      variable.load(value, session)
    if start:
      tf.train.Saver().save(session, os.path.join(start, 'model.ckpt'), 0, write_meta_graph=False)
    _, report = session.run([model.train_op, model.report])
    values = session.run({variable.op.name: variable for variable in tf.global_variables()})
    assert len(tf.trainable_variables()) == 38
  return Update(values, report, start)


def assert_same_update(one, other):
  """Both are all variables, {name: value}, after a first update from the same 128 records."""
  assert sorted(one) == sorted(other) and not [name for name in other if 'tower' in name]
  assert one['global_step'] == other['global_step'] == 1 and one['global_step'].dtype == np.int64
  assert one['images_seen'] == other['images_seen'] == 128
  for name in one:
    # After one step the accumulator of the momentum is the gradient, weight decay included.
    value = one[name].astype(np.float64)
    assert np.linalg.norm(other[name] - value) < 1e-4 * max(np.linalg.norm(value), 1e-30), name
    if name.endswith('/Momentum'):
      assert np.abs(one[name]).max() > 0, name


@pytest.fixture(scope='session')
def one_tower(tmp_path_factory):
  """Update of one tower; its `start` holds the checkpoint before it."""
  return after_one_step(1, str(tmp_path_factory.mktemp('one tower')))


@pytest.fixture
def resumable(two_steps, tmp_path):
  """A copy of `two_steps`, to train on."""
  return shutil.copytree(two_steps, str(tmp_path / 'resumable'))


def logits_of(checkpoint, images):
  """Logits [n, 10] of uint8 images [n, 32, 32, 3], by numpy preprocessing and one plain run of the network."""
  pixels = images[:, 2:30, 2:30].astype(np.float64)
  pixels = (pixels - pixels.mean((1, 2, 3), keepdims=True)) / pixels.std((1, 2, 3), keepdims=True)
  with tf.Graph().as_default(), tf.Session() as session:
    image_batch = tf.placeholder(tf.float32, [None, 28, 28, 3])
    logits = network.NETWORK(image_batch, None, 1, 10, False).logits
    tf.train.Saver(tf.trainable_variables()).restore(session, checkpoint)
    return session.run(logits, {image_batch: pixels})
