"""What the tests share: small data made on the spot, a narrow VGG19, and the scripts run as a user runs them."""

import collections
import contextlib
import faulthandler
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import data_input  # noqa: E402, and before TensorFlow: it sets up its messages

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import reference  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import network  # noqa: E402
import train  # noqa: E402

tf.get_logger().addFilter(lambda record: 'deprecated' not in record.getMessage())

SCRIPTS = ('data_input.py', 'network.py', 'train.py', 'val.py', 'toTFRecords.py', 'test_tfrecords.py')

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

PROCESS_SECONDS = 120  # after which a process counts as hung; on a busy machine a mere start may take 20
TEST_SECONDS = 150  # the same for a test; those marked long have an hour


# ---------------------------------------------------------------- tests that hang


def pytest_configure(config):
  config.real_stderr = os.dup(2)  # where stacks are written: pytest redirects 2 while a test runs


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
  """Ends the whole run, naming the test and showing all stacks, where one test takes longer than its time."""
  seconds = 3600 if item.get_closest_marker('long') else TEST_SECONDS
  named = threading.Timer(seconds - 1, os.write, [item.config.real_stderr, b'\nHANGS %s\n' % item.nodeid.encode()])
  named.daemon = True
  named.start()
  faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.real_stderr)
  yield
  faulthandler.cancel_dump_traceback_later()
  named.cancel()


# ---------------------------------------------------------------- a narrow VGG19

# The same 19 layers, 38 variables and names, so that a checkpoint has 100 kB instead of 312 MB.
FULL_SIZE = network.BLOCKS, network.DENSE
NARROW = [[8] * len(widths) for widths in network.BLOCKS], [16] * len(network.DENSE)
network.BLOCKS, network.DENSE = NARROW


@pytest.fixture
def full_size(monkeypatch):
  """For tests whose subject is size: the network as it is."""
  monkeypatch.setattr(network, 'BLOCKS', FULL_SIZE[0])
  monkeypatch.setattr(network, 'DENSE', FULL_SIZE[1])


@functools.lru_cache(None)
def narrow_scripts():
  """A folder with copies of the six scripts, the network in them narrow."""
  folder = tempfile.TemporaryDirectory(prefix='narrow scripts ')
  for name in SCRIPTS:
    with open(os.path.join(ROOT, name), encoding='utf-8') as f:
      text = f.read()
    if name == 'network.py':
      marker = '\nWEIGHT_DECAY = '
      assert text.count(marker) == 1
      text = text.replace(marker, '\nBLOCKS, DENSE = %r%s' % (NARROW, marker))
    with open(os.path.join(folder.name, name), 'w', encoding='utf-8') as f:
      f.write(text)
  return folder


# ---------------------------------------------------------------- the scripts as commands


def command(name, *arguments, full=False):
  """The command line of a script, the narrow one unless `full`."""
  folder = ROOT if full else narrow_scripts().name
  return [sys.executable, os.path.join(folder, name)] + [str(argument) for argument in arguments]


def environment(**changes):
  """The environment of a user who has set nothing for TensorFlow or Python, but for `changes`."""
  environ = dict(os.environ, PYTHONIOENCODING='utf-8')
  for name in ('TF_CPP_MIN_LOG_LEVEL', 'PYTHONUNBUFFERED', 'TF_CONFIG'):  # the first is set by importing data_input
    environ.pop(name, None)
  return dict(environ, **changes)


def run_script(script, *arguments, status=0, full=False, **options):
  """Runs a script as a command; its exit status must be `status`. Returns the completed process, outputs as text."""
  options.setdefault('stdout', subprocess.PIPE)
  environ = environment(**options.pop('env', {}))
  done = subprocess.run(command(script, *arguments, full=full), stderr=subprocess.PIPE, encoding='utf-8',
                        timeout=PROCESS_SECONDS, env=environ, **options)  # fmt: skip
  assert done.returncode == status, done.stderr
  return done


# Runs command lines read as JSON, each as if it were alone, and writes what came of them as JSON.
ONE_PROCESS = """
import contextlib, io, json, os, runpy, sys
results = os.fdopen(os.dup(1), 'w')
for line in json.load(sys.stdin):
  sys.argv, status, streams = line, 0, (io.StringIO(), io.StringIO())
  with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
    try:
      runpy.run_path(line[0], run_name='__main__')
    except SystemExit as end:
      status = end.code
  json.dump([status] + [stream.getvalue() for stream in streams], results)
  results.write('\\n')
"""

Ended = collections.namedtuple('Ended', 'status stdout stderr')


def run_in_one_process(*lines):
  """Runs command lines of scripts, full size, one after the other in one new process. Returns an Ended for each.

  Its status is 0, or what was given to sys.exit: a number, or the text that ends on stderr.
  """
  lines = [[os.path.join(ROOT, line[0])] + list(line[1:]) for line in lines]
  done = subprocess.run([sys.executable, '-c', ONE_PROCESS], input=json.dumps(lines), stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE, encoding='utf-8', timeout=PROCESS_SECONDS, cwd=ROOT, env=environment())  # fmt: skip
  ends = [Ended(*json.loads(line)) for line in done.stdout.splitlines()]
  assert len(ends) == len(lines), done.stderr
  return ends


def clean_error(name, *arguments, **options):
  """Runs a script that must end as a user's mistake does: status 1, one error line, nothing on stdout. Returns the line."""
  done = run_script(name, *arguments, status=1, **options)
  lines = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
  assert len(lines) == 1 and 'Traceback' not in done.stderr, done.stderr
  assert not done.stdout
  return lines[0]


@contextlib.contextmanager
def flags_of(script, *arguments):
  """Sets the flags of the module `script` from a command line; yields its words; puts flags and signal handlers back."""
  handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
  try:
    script.FLAGS.set_gnu_getopt(True)
    yield script.FLAGS([script.__name__] + [str(argument) for argument in arguments])[1:]
  finally:
    for name in script.FLAGS:
      script.FLAGS[name].unparse()
    for number, handler in handlers.items():
      signal.signal(number, handler)


def call(script, *arguments):
  """Runs the main of the module `script` in this process, with a command line."""
  with flags_of(script, *arguments) as words:
    script.main(words)


def mistake(script, *arguments):
  """What the module `script` says of a wrong command line, in this process: the text that `run` makes an error line of."""
  with pytest.raises(data_input.flags.Error) as raised:
    call(script, *arguments)
  return str(raised.value)


def assert_readable(stderr):
  for word in CHATTER:
    assert word not in stderr, stderr


# ---------------------------------------------------------------- data


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


# ---------------------------------------------------------------- checkpoints


@pytest.fixture(scope='session')
def wide_awake(tmp_path_factory):
  """A folder with checkpoint 7 of a network that tells images apart: scaled so that signals reach the last layer."""
  folder = str(tmp_path_factory.mktemp('wide_awake'))
  images = np.random.RandomState(3).randint(0, 256, [64, 32, 32, 3]).astype(np.uint8)
  with tf.Graph().as_default(), tf.Session() as session:
    tf.set_random_seed(3)
    network.evaluation_network(tf.placeholder(tf.float32, [None, 28, 28, 3]), 10)
    session.run(tf.global_variables_initializer())
    values = session.run({variable.op.name: variable for variable in tf.trainable_variables()})
    logits = reference.logits(values, reference.evaluation_images(images))
    # Centred, so that no class is the answer to all, and far enough apart that float32 decides as float64 does.
    scale = 2 / logits.std(0)
    for variable in tf.trainable_variables()[-2:]:
      value = values[variable.op.name]
      variable.load(value * scale if value.ndim > 1 else -logits.mean(0) * scale, session)
    tf.train.Saver().save(session, os.path.join(folder, 'model.ckpt'), 7, write_meta_graph=False)
  return folder


@pytest.fixture
def wide_awake_copy(wide_awake, tmp_path):
  """A copy of it to write to, without what validations of it have left."""
  return shutil.copytree(wide_awake, str(tmp_path / 'wide awake copy'), ignore=shutil.ignore_patterns('eval'))


def values_of(checkpoint):
  """{name: value} of all that a checkpoint, or the newest of a folder, holds."""
  reader = tf.train.NewCheckpointReader(network.find_checkpoint(str(checkpoint)))
  return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def logits_of(checkpoint, images):
  """Logits [n, 10] of uint8 images [n, 32, 32, 3], preprocessed and computed without TensorFlow."""
  return reference.logits(values_of(checkpoint), reference.evaluation_images(images))


@pytest.fixture(scope='session')
def two_steps(tmp_path_factory):
  """What train.py, as a command, left and said after two steps of four towers of 2: a folder and stderr."""
  data, folder = tmp_path_factory.mktemp('data'), str(tmp_path_factory.mktemp('two steps'))
  write_small_data(data)
  done = run_script('train.py', '--data_dir', data, '--checkpoint_dir', folder, '--num_gpus', 4, '--batch_size', 2,
                    '--max_steps', 2)  # fmt: skip
  assert not done.stdout
  return folder, done.stderr


@pytest.fixture
def resumable(two_steps, tmp_path):
  """A copy of the folder of `two_steps`, to train on."""
  return shutil.copytree(two_steps[0], str(tmp_path / 'resumable'))


# ---------------------------------------------------------------- updates

RECORDS = 16  # of FixedData


class FixedData(object):
  """The same 16 records each step, dealt out to the towers in turn from the `first` on: what data_input is to train.build."""

  num_classes, num_records = 10, 1000

  def __init__(self, batch_size, first=0):
    draw = np.random.RandomState(0)
    self.images = draw.normal(size=[RECORDS, 28, 28, 3]).astype(np.float32)
    self.labels = np.arange(RECORDS) % 10
    self.batch_size, self.queue_fill, self._next = batch_size, tf.constant((1 + first) / RECORDS), first

  def next_batch(self):
    some = slice(self._next, self._next + self.batch_size)
    self._next += self.batch_size
    return tf.constant(self.images[some]), tf.constant(np.eye(10, dtype=np.float32)[self.labels[some]])


def start_values(shapes):
  """{name: value} for variables of {name: shape}: such that the update hardly depends on rounding."""
  draw = np.random.RandomState(1)
  values = {}
  for name, shape in sorted(shapes.items()):
    # Biases keep every ReLU open. A product rounds otherwise for another batch size, by 1e-7; where that shuts a
    # single ReLU out of a million near zero, gradients differ by up to 2e-3, on whatever towers.
    scale = 0.3 / np.sqrt(np.prod(shape[:-1]))
    values[name] = draw.normal(scale=scale, size=shape) if len(shape) > 1 else np.ones(shape)
  return {name: value.astype(np.float32) for name, value in values.items()}


Update = collections.namedtuple('Update', 'values report')


def updates(num_towers, count, peak=0.1, keep_prob=1):
  """`count` updates of `num_towers` towers that share the records of FixedData, in a schedule of one epoch of 1000 images.

  Returns an Update for the start, whose report is None, and for each update: every variable after it, and the report.
  """
  devices = ['/cpu:%d' % i for i in range(num_towers)]
  with tf.Graph().as_default(), tf.Session(config=network.session_config(num_towers)) as session:
    model = train.build(FixedData(RECORDS // num_towers), devices, 1, peak, 0.9, keep_prob)
    session.run(tf.global_variables_initializer())
    values = start_values({variable.op.name: variable.shape.as_list() for variable in tf.trainable_variables()})
    for variable in tf.trainable_variables():
      variable.load(values[variable.op.name], session)
    variables = {variable.op.name: variable for variable in tf.global_variables()}
    done = [Update(session.run(variables), None)]
    for _ in range(count):
      _, report = session.run([model.train_op, model.report])
      done.append(Update(session.run(variables), report))
  return done
