"""Trains VGG19 on CIFAR-10: one tower per GPU, gradients averaged, one update.

  python train.py                         all visible GPUs, or one tower on the CPU
  python train.py --num_gpus 4            four towers; without a GPU on virtual CPU devices, for trying
  TF_CONFIG=... python train.py           the same on each machine of a cluster, see the README
  tensorboard --logdir checkpoints        loss, accuracy, learning rate, images/s, queue fill

`--epochs 15`, 2 cores without a GPU: 78.1 % of the 10,000 test images; 34 minutes at 375 images/s.
Run again in the same folder, it goes on where it was. Ctrl-C or SIGTERM saves first.
"""

import collections
import contextlib
import json
import math
import os
import re
import select
import signal
import socket
import sys
import threading
import time

import data_input  # first: it imports TensorFlow quietly

import numpy as np
import tensorflow.compat.v1 as tf
from tqdm import tqdm

import network

flags = tf.app.flags
FLAGS = flags.FlagValues()
flags.DEFINE_string('data_dir', 'data', 'folder with the .bin files, or the one above it', flag_values=FLAGS)
flags.DEFINE_string('checkpoint_dir', 'checkpoints', 'folder for checkpoints and summaries; resumes there', flag_values=FLAGS)
flags.DEFINE_integer('num_gpus', None, 'towers (default: all visible GPUs, or one CPU tower)', 1, flag_values=FLAGS)
flags.DEFINE_integer('batch_size', 128, 'images per tower and step', 1, 1 << 16, flag_values=FLAGS)
flags.DEFINE_float('epochs', 100, 'passes over the data; fixes the learning rate schedule', 1e-3, flag_values=FLAGS)
flags.DEFINE_integer('max_steps', None, 'stop at this global step; leaves the schedule as it is', 1, flag_values=FLAGS)
flags.DEFINE_float('learning_rate', 0.03, 'peak, reached after the warm-up', 0, flag_values=FLAGS)
flags.DEFINE_float('momentum', 0.9, 'of the update', 0, 1, flag_values=FLAGS)
flags.DEFINE_float('keep_prob', 0.8, 'probability that dropout keeps a unit of fc6 and fc7', 1e-3, 1, flag_values=FLAGS)
flags.DEFINE_integer('save_steps', 400, 'steps between checkpoints', 1, flag_values=FLAGS)
flags.DEFINE_integer('keep_checkpoints', 5, 'newest checkpoints that stay on disk', 1, flag_values=FLAGS)
flags.DEFINE_integer('num_threads', data_input.default_threads(), 'preprocessing threads', 1, flag_values=FLAGS)
flags.DEFINE_integer('seed', None, 'of weights, order and augmentation (default: another each run)', flag_values=FLAGS)
for name in ('epochs', 'learning_rate', 'momentum', 'keep_prob'):
  flags.register_validator(name, math.isfinite, 'give a finite number', FLAGS)

SAME_FLAGS = ('epochs', 'max_steps', 'learning_rate', 'momentum', 'keep_prob')  # on all machines
WARMUP_EPOCHS = 5  # He-normal weights without batch norm stay at a cross-entropy of 2.3 if the rate grows faster
SUMMARY_STEPS = 10  # steps that one TensorBoard point averages
LINE_SECONDS = 10  # between progress lines
LINE = (
  'step {step}/{last_step}  epoch {epoch:.2f}  loss {loss:.3f} (cross-entropy {cross_entropy:.3f})  accuracy {accuracy:.1%}  '
  'learning rate {learning_rate:.5f}  queue {queue_fill:.0%}  {images_per_second:.0f} images/s  {left} left'
)


# ---------------------------------------------------------------- several machines

# What TensorFlow raises where another worker is lost.
LOSS_ERRORS = (
  tf.errors.UnavailableError,
  tf.errors.AbortedError,
  tf.errors.CancelledError,
  tf.errors.InternalError,
  tf.errors.FailedPreconditionError,
)
PIECE_BYTES = 16 << 20  # in smaller pieces gradients take more of the CPU, in one piece longer on the link; see the README
LOOK_SECONDS = 0.5  # between checks that the other workers still answer
RESTART_SECONDS = 2  # pause before a restart, so that every other worker notices the same loss
TF_CONFIG_FORM = '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'


def read_tf_config(text):
  """Reads the text of the environment variable TF_CONFIG.

  Returns the workers as [(name, 'host:port')], the chief first, and the name of this process, such as 'worker 1'. The
  list is empty where this process trains alone or is no worker. Raises flags.Error.
  """
  wrong_form = flags.Error('TF_CONFIG must be %s, not %s' % (TF_CONFIG_FORM, text))
  try:
    config = json.loads(text or '{}')
    task = dict(config.get('task', {}))
    cluster = tf.train.ClusterSpec(config.get('cluster', {})).as_dict()
  except (ValueError, TypeError, AttributeError):
    raise wrong_form
  own = '%s %s' % (task.get('type'), task.get('index', 0))
  if task.get('type') in ('evaluator', 'ps'):
    return [], own
  if 'ps' in cluster:
    raise flags.Error('TF_CONFIG: there are no parameter servers, as every worker holds the model: write ' + TF_CONFIG_FORM)
  cluster.pop('evaluator', None)
  workers = [('%s %d' % (job, i), address) for job in sorted(cluster) for i, address in enumerate(cluster[job])]
  has_known_jobs = set(cluster) <= {'chief', 'worker'} and all(cluster.values()) and len(cluster.get('chief', [])) <= 1
  if not has_known_jobs or not all(is_address(address) for _, address in workers):
    raise wrong_form
  if workers and own not in dict(workers) and (task or len(workers) > 1):
    raise flags.Error('TF_CONFIG: its task %s is not in its cluster %s' % (json.dumps(task), json.dumps(cluster)))
  return workers if len(workers) > 1 else [], own


def is_address(text):
  """Whether `text` is 'host:port'."""
  match = re.match(r'[^\s/@]+:([0-9]{1,5})$', text)
  return bool(match) and 0 < int(match.group(1)) < 1 << 16


class Alone(tf.train.SessionRunHook):
  """A process that trains by itself: there is nobody to agree or to add up with."""

  def __init__(self):
    self.rank = 0
    self.device = None
    self.target = ''

  def session_config(self, num_cpus):
    return network.session_config(num_cpus)

  def agree(self, start, same, images):
    return start, images

  def broadcast(self, variables):
    return tf.no_op()

  def all_reduce(self, tensors):
    return tensors

  @contextlib.contextmanager
  def recovery(self):
    yield


ALONE = Alone()


class AllReduce(Alone):
  """One of several workers, each of which holds all variables and applies the same update.

  TensorFlow's collective ops add up tensors over a ring of the workers' CPUs. A worker that is lost stops the ring: the
  others start again as new processes, wait for it, and resume from the chief's last checkpoint.

  Args:
    workers, own: see `read_tf_config`.
    num_cpus: virtual CPU devices of this process.
  """

  def __init__(self, workers, own, num_cpus):
    super().__init__()
    self.rank = [name for name, _ in workers].index(own)
    self.device = '/job:worker/task:%d' % self.rank
    self._addresses = [address for _, address in workers]
    self._names = ['%s at %s' % worker for worker in workers]
    self._collectives = 0
    self._barrier = None
    self._phase = 'joining'  # then 'training', at last 'over'
    self._signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    self._server = self._listen(num_cpus)
    self.target = self._server.target

  def session_config(self, num_cpus):
    config = network.session_config(num_cpus)
    config.device_filters.append(self.device)
    config.experimental.collective_group_leader = '/job:worker/replica:0/task:0'
    return config

  def agree(self, start, same, images):
    """Waits for all workers. Returns the chief's `start`, a list of integers, and the sum of all workers' `images`.

    Raises flags.Error where the numbers `same`, a dict, are not those of the chief.
    """
    self._wait_for_others()
    threading.Thread(target=self._watch, daemon=True).start()
    own = np.array(list(start) + list(same.values()), np.float64)
    with tf.Graph().as_default(), tf.device(self.device + '/cpu:0'):
      sums = self._sum(tf.constant(own * (self.rank == 0))), self._sum(tf.constant([images]))
      with tf.Session(self.target, config=self.session_config(1)) as session:
        of_chief, all_images = session.run(sums)
    for name, here, there in zip(same, own[len(start) :], of_chief[len(start) :]):
      if here != there:
        raise flags.Error('%s is %g here but %g at %s: give all workers the same' % (name, here, there, self._names[0]))
    return [int(number) for number in of_chief[: len(start)]], int(all_images[0])

  def broadcast(self, variables):
    """Returns an op that sets the variables of all workers to the chief's values."""
    with tf.device('/cpu:0'):
      values = [variable.value() if self.rank == 0 else tf.zeros_like(variable.value()) for variable in variables]
      return tf.group([variable.assign(self._sum(value)).op for variable, value in zip(variables, values)])

  def all_reduce(self, tensors):
    """Returns the sums of tensors over all workers."""
    with tf.device('/cpu:0'):
      self._barrier = self._sum(tf.zeros([1]))
      sums = [self._sum(tensor) for tensor in tensors]
      with tf.control_dependencies(sums):  # no worker updates a variable before it has all gradients
        return [tf.identity(value) for value in sums]

  def _sum(self, tensor):
    """The sum of one tensor over all workers, in pieces."""
    options = {'group_size': len(self._names), 'group_key': 1, 'merge_op': 'Add', 'final_op': 'Id', 'subdiv_offsets': [0]}
    flat = tf.reshape(tensor, [-1])
    size = PIECE_BYTES // flat.dtype.size
    pieces = []
    for start in range(0, flat.shape.num_elements(), size):
      self._collectives += 1  # the same number on all workers, as they build the same graphs
      pieces.append(tf.raw_ops.CollectiveReduce(input=flat[start : start + size], instance_key=self._collectives, **options))
    return tf.reshape(tf.concat(pieces, 0), tensor.shape)

  def after_create_session(self, session, _):
    self._phase = 'training'

  def end(self, session):
    """As the last hook: no worker ends before all have done the last step, and the chief has saved it."""
    session.run(self._barrier)
    self._phase = 'over'

  @contextlib.contextmanager
  def recovery(self):
    """A context for all work with other workers: where one of them is lost, this process starts again."""
    try:
      yield
    except LOSS_ERRORS as error:
      time.sleep(5 * RESTART_SECONDS)  # in which the watching thread finds who is lost, and starts again itself
      self._start_again('the other workers (%s)' % network.reason_of(error))
    finally:
      self._phase = 'over'

  def _host_and_port(self, rank):
    host, _, port = self._addresses[rank].rpartition(':')
    return host.strip('[]'), int(port)  # without the brackets of IPv6

  def _listen(self, num_cpus):
    """Starts TensorFlow's server for the other workers, which are reached directly also where a proxy is set."""
    hosts = [self._host_and_port(rank)[0] for rank in range(len(self._names))]
    for variable in ('no_proxy', 'no_grpc_proxy'):  # which one gRPC obeys depends on the TensorFlow
      known = os.environ.get(variable, '').split(',')
      os.environ[variable] = ','.join(dict.fromkeys(filter(None, known + hosts)))  # each once, though restarts come back here
    try:
      with socket.socket() as probe:  # TensorFlow's own error prints a page of its C++ part
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(('', self._host_and_port(self.rank)[1]))
      cluster = tf.train.ClusterSpec({'worker': self._addresses})
      return tf.train.Server(cluster, 'worker', self.rank, config=self.session_config(num_cpus))
    except (OSError, tf.errors.OpError) as error:
      raise flags.Error('TF_CONFIG: %s cannot listen: %s' % (self._names[self.rank], error))

  def _missing(self):
    """Returns the names of the other workers that do not answer."""
    missing = []
    for rank, name in enumerate(self._names):
      try:
        if rank != self.rank:
          socket.create_connection(self._host_and_port(rank), 2).close()
      except (OSError, UnicodeError):  # the second for what can be no host name
        missing.append(name)
    return missing

  def _wait_for_others(self):
    data_input.say('%s listens' % self._names[self.rank])
    said = []
    while True:
      missing = self._missing()
      if not missing:
        return
      if missing != said:
        data_input.say('waiting for ' + ', '.join(missing))
        said = missing
      time.sleep(LOOK_SECONDS)

  def _watch(self):
    """A thread that acts where the main thread cannot, which waits in the ring."""
    signals, missing_before = b'', []
    while self._phase != 'over':
      time.sleep(LOOK_SECONDS)
      missing = self._missing()
      lost = [name for name in missing if name in missing_before]  # at two looks: one may fail on a busy network
      missing_before = missing
      if lost and self._phase == 'training':
        time.sleep(RESTART_SECONDS)
      if select.select([self._signals], [], [], 0)[0]:
        signals += os.read(self._signals, 9)
      if signals and (lost or self._phase == 'joining' or len(signals) > 1) and self._phase != 'over':
        os._exit(128 + signals[0])
      if lost and self._phase != 'over':
        self._start_again(', '.join(lost))

  @staticmethod
  def _start_again(lost):
    data_input.warn('lost %s; starting again from the last checkpoint' % lost)
    os.execv(sys.executable, [sys.executable] + sys.argv)


# ---------------------------------------------------------------- towers


def tower_devices(num_gpus):
  """Devices of the towers. Raises flags.Error where more GPUs are asked for than there are."""
  visible = len(tf.config.experimental.list_physical_devices('GPU'))
  if not visible:
    towers = num_gpus or 1
    data_input.warn(
      'TensorFlow sees no GPU: %d tower%s on the CPU, many times slower than a GPU. If there is one, start with '
      'TF_CPP_MIN_LOG_LEVEL=0 to read why it is not used' % (towers, ' runs' if towers == 1 else 's run')
    )
    return ['/cpu:%d' % i for i in range(towers)]
  if (num_gpus or 0) > visible:
    raise flags.Error('--num_gpus %d: only %d visible; give at most that' % (num_gpus, visible))
  return ['/gpu:%d' % i for i in range(num_gpus or visible)]


def learning_rate(images_seen, num_records, epochs, peak):
  """Linear warm-up to `peak`, then half a cosine to 0 at the end of the last epoch: a float32 scalar.

  It depends on the images seen alone: an integer tensor, those of the coming update included.
  """
  epoch = tf.cast(images_seen, tf.float32) / num_records
  warmup = min(WARMUP_EPOCHS, epochs / 2)
  progress = tf.clip_by_value((epoch - warmup) / (epochs - warmup), 0.0, 1.0)
  return peak * tf.minimum(epoch / warmup, 0.5 + 0.5 * tf.cos(math.pi * progress))


def average_gradients(tower_grads):
  """Mean of each variable's gradients over the towers, computed where the variable lives.

  `tower_grads` is a list over towers of [(gradient, variable)], in the same order of variables. Returns
  [(mean gradient, variable)]. Raises ValueError where a gradient is None, with the name of its variable.
  """
  average = []
  for pairs in zip(*tower_grads):
    gradients, variable = [gradient for gradient, _ in pairs], pairs[0][1]
    if any(gradient is None for gradient in gradients):
      raise ValueError('a tower has no gradient of %s: its loss does not depend on it' % variable.op.name)
    with tf.device(variable.device):
      mean = gradients[0] if len(gradients) == 1 else tf.add_n(gradients) / len(gradients)
    average.append((mean, variable))
  return average


def make_counters():
  """The variables global_step, which counts weight updates, and images_seen, both int64."""
  with tf.device('/cpu:0'):
    images_seen = tf.get_variable('images_seen', [], tf.int64, tf.zeros_initializer(), trainable=False, use_resource=True)
    return tf.train.get_or_create_global_step(), images_seen


Model = collections.namedtuple('Model', 'train_op report signalled')


def build(data, devices, epochs, peak, momentum, keep_prob, global_batch=None, all_reduce=ALONE.all_reduce):
  """The training graph: a tower on each of `devices`, fed from the queue of `data`.

  Args:
    global_batch: images of an update; more than those of the towers where other processes have a part in it.
    all_reduce: function of a list of tensors that gives their sums over all processes.

  Returns:
    Model: train_op; report, a dict of scalars: step, images_seen and epoch after the update, and loss, cross_entropy,
    accuracy, learning_rate and queue_fill of before it, means over the images; signalled, a placeholder: what is fed
    there comes out as report['signalled'], a mean as well.
  """
  own_batch = len(devices) * data.batch_size
  weight = own_batch / (global_batch or own_batch)  # this process's part of the means over all images
  global_step, images_seen = make_counters()
  with tf.device('/cpu:0'):
    seen_after = images_seen + (global_batch or own_batch)
    rate = learning_rate(seen_after, data.num_records, epochs, peak)
    signalled = tf.placeholder_with_default(0.0, [], 'signalled')
  optimizer = tf.train.MomentumOptimizer(rate, momentum)

  variable_devices = network.spread_variables(devices if 'gpu' in devices[0] else devices[:1], data.num_classes)
  towers, tower_grads = [], []
  for i, device in enumerate(devices):
    with tf.device(network.tower_device(device, variable_devices)), tf.name_scope('tower_%d' % i):
      with tf.variable_scope('', reuse=i > 0):
        tower = network.NETWORK(*data.next_batch(), keep_prob, data.num_classes, True)
      tower_grads.append(optimizer.compute_gradients(weight * tower.losses, tf.trainable_variables()))
      towers.append(tower)
  gradients, variables = zip(*average_gradients(tower_grads))
  with tf.device('/cpu:0'):
    names = 'loss', 'cross_entropy', 'accuracy', 'queue_fill', 'signalled'
    of_towers = zip(*[(tower.losses, tower.cross_entropy, tower.accuracy) for tower in towers])
    means = [tf.add_n(values) / len(towers) for values in of_towers]
    numbers = weight * tf.stack(means + [tf.cast(data.queue_fill, tf.float32), signalled])
  *gradients, numbers = all_reduce(list(gradients) + [numbers])
  with tf.control_dependencies([numbers]):  # with the old values read, the update can work in place instead of on a copy
    update = optimizer.apply_gradients(zip(gradients, variables), global_step)

  with tf.device('/cpu:0'):
    report = dict(zip(names, tf.unstack(numbers)), learning_rate=rate)
    with tf.control_dependencies([update]):
      train_op = tf.assign(images_seen, seen_after).op
    with tf.control_dependencies([train_op]):
      report.update(step=global_step.read_value(), images_seen=images_seen.read_value())
    report['epoch'] = report['images_seen'] / data.num_records
  return Model(train_op, report, signalled)


# ---------------------------------------------------------------- hooks


class StopHook(tf.train.SessionRunHook):
  """Ends training after `last_step`, or after a step before which SIGINT or SIGTERM has come to this or another process."""

  def __init__(self, model, last_step):
    self.signum = None  # the signal that has come to this process
    self._model = model
    self._last_step = last_step
    self._previous = {}

  def begin(self):
    for number in (signal.SIGINT, signal.SIGTERM):
      self._previous[number] = signal.signal(number, self._on_signal)

  def _on_signal(self, signum, _):
    self.signum = signum
    # Not print, which a signal may have interrupted.
    os.write(2, os.isatty(2) * b'\n' + b'stopping after one more step, and a save\n')
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def before_run(self, _):
    return tf.train.SessionRunArgs(self._model.report, {self._model.signalled: float(self.signum is not None)})

  def after_run(self, run_context, values):
    if values.results['signalled'] or values.results['step'] >= self._last_step:
      run_context.request_stop()


class CheckpointHook(tf.train.SessionRunHook):
  """Saves every `save_steps` steps and at the end. Numbers that are not finite end training and are never saved.

  `saver` is a network.CheckpointWriter, or None where another process writes.
  """

  def __init__(self, report, saver, save_steps, last_step):
    self._fetches = [report['step'], report['loss']]
    self._saver = saver
    self._save_steps = save_steps
    self._last_step = last_step
    self._step = 0
    self._saved = 0
    floats = [variable for variable in tf.global_variables() if variable.dtype.is_floating]
    self._all_finite = tf.reduce_all([tf.reduce_all(tf.is_finite(variable.value())) for variable in floats])

  def after_create_session(self, session, _):
    self._saved = self._step = session.run(tf.train.get_global_step())

  def before_run(self, _):
    return tf.train.SessionRunArgs(self._fetches)

  def after_run(self, run_context, values):
    self._step, loss = values.results
    if not np.isfinite(loss):
      self._fail()
    if self._step >= self._saved + self._save_steps:
      self._save(run_context.session)

  def end(self, session):
    if self._step > self._saved:
      self._save(session)
    if self._saver:
      data_input.say('saved step %d in %s' % (self._saved, self._saver.folder))
      network.mark_training(self._saver.folder, done=self._step >= self._last_step)

  def _save(self, session):
    if not session.run(self._all_finite):
      self._fail()
    if self._saver:
      self._saver.save(session, self._step)
    self._saved = self._step

  def _fail(self):
    raise flags.Error(
      'step %d: loss or weights are not finite, and nothing was saved since step %d. Lower --learning_rate; started again, '
      'training resumes at that step' % (self._step, self._saved)
    )


class ProgressHook(tf.train.SessionRunHook):
  """Shows progress on stderr, lines and on a terminal a bar below them, and writes it for TensorBoard to `folder`, if any."""

  def __init__(self, report, folder, last_step):
    self._report = {name: tensor for name, tensor in report.items() if name != 'signalled'}
    self._summaries = data_input.Summaries(folder)
    self._last_step = last_step
    self._first_step = 0
    self._images_seen = 0  # at the last point
    self._since = 0.0  # the time of the last point
    self._line_time = 0.0
    self._points = []
    self._bar = None

  def after_create_session(self, session, _):
    self._first_step, self._images_seen = session.run([tf.train.get_global_step(), tf.global_variables('images_seen')[0]])
    self._summaries.start(session.graph, self._first_step)
    bar_format = '{percentage:3.0f}%|{bar:30}| {desc}'
    self._bar = tqdm(total=self._last_step, initial=self._first_step, disable=None, file=sys.stderr, bar_format=bar_format)
    self._since = time.time()

  def before_run(self, _):
    return tf.train.SessionRunArgs(self._report)

  def after_run(self, _, values):
    self._points.append(values.results)
    step = values.results['step']
    # The first step fills the queue and warms up, so its images/s stands alone.
    if step % SUMMARY_STEPS == 0 or step in (self._first_step + 1, self._last_step):
      self._show(values.results)

  def _show(self, last):
    step = last['step']
    seconds = time.time() - self._since
    mean = {name: float(np.mean([point[name] for point in self._points])) for name in self._report}
    mean['images_per_second'] = (last['images_seen'] - self._images_seen) / seconds
    left = tqdm.format_interval((self._last_step - step) * seconds / len(self._points))
    self._since += seconds
    self._images_seen = last['images_seen']
    self._points = []
    curves = {name: mean[name] for name in mean if name not in ('step', 'images_seen')}
    self._summaries.add(data_input.scalars(curves), step)
    self._bar.update(step - self._bar.n)
    self._bar.set_description_str('step %d/%d  %s left' % (step, self._last_step, left))
    if self._since > self._line_time + LINE_SECONDS or step == self._last_step:
      self._line_time = self._since
      mean.update(step=step, last_step=self._last_step, epoch=last['epoch'], left=left)
      data_input.say(LINE.format(**mean))

  def end(self, _):
    self._bar.close()
    self._summaries.close()


# ---------------------------------------------------------------- the run


def do_other_work(own):
  """Does not return where TF_CONFIG gives this process another role than that of a worker."""
  if own.startswith('ps '):
    data_input.say('%s has nothing to do: every worker holds the model' % own)
    sys.exit(0)
  if own.startswith('evaluator '):
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'val.py')
    folders = ['--data_dir', FLAGS.data_dir, '--checkpoint_dir', FLAGS.checkpoint_dir]
    os.execv(sys.executable, [sys.executable, script, '--watch'] + folders)


def read_counters(checkpoint):
  """Returns global step and images seen of a checkpoint; zeros for None."""
  if not checkpoint:
    return [0, 0]
  with tf.Graph().as_default():
    return [int(value) for value in network.read_values(checkpoint, make_counters())[1]]


def print_header(devices, global_batch, data, folder):
  parameters = sum(variable.shape.num_elements() for variable in tf.trainable_variables())
  shown = tf.__version__, len(devices), ' '.join(devices), global_batch, format(parameters, ',')
  data_input.say('TensorFlow %s; %d tower(s) on %s; global batch %d; VGG19 with %s parameters' % shown)
  shown = data.num_records, os.path.dirname(data.filenames[0]), folder
  data_input.say('%d records in %s; checkpoints and summaries in %s' % shown)


def train(workers, model, hooks, checkpoint, num_cpus):
  """Runs steps until a hook ends them. The chief starts from `checkpoint`, or new if it is None, the others as the chief."""
  variables = tf.global_variables()
  as_the_chief = workers.broadcast(variables)

  def set_variables(_, session):
    if checkpoint:
      network.restore(session, variables, checkpoint)
    session.run(as_the_chief)

  scaffold = tf.train.Scaffold(init_fn=set_variables)
  config = workers.session_config(num_cpus)
  try:
    # Unlike MonitoredTrainingSession, it raises UnavailableError instead of making a new session in this process.
    with tf.train.SingularMonitoredSession(hooks + [workers], scaffold, workers.target, config) as session:
      while not session.should_stop():
        session.run(model.train_op)
  except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError, tf.errors.DataLossError) as error:
    raise flags.Error('reading the training data failed: %s' % network.reason_of(error))


def train_to_the_end(workers, devices):
  """Trains until the last step is done or a signal comes; returns the signal's number, or None."""
  checkpoint, folder, saver = None, None, None  # only the chief reads and writes checkpoints
  if workers.rank == 0:
    checkpoint = network.resume_point(FLAGS.checkpoint_dir)
    folder = os.path.dirname(checkpoint) or '.' if checkpoint else FLAGS.checkpoint_dir
  tf.set_random_seed(None if FLAGS.seed is None else FLAGS.seed + workers.rank)
  data = data_input.data_input(FLAGS.data_dir, FLAGS.batch_size, len(data_input.CLASSES), True, FLAGS.num_threads)

  same = {'--' + name: getattr(FLAGS, name) or 0 for name in SAME_FLAGS}
  same['number of records'] = data.num_records
  own_batch = len(devices) * FLAGS.batch_size
  (first_step, images_seen), global_batch = workers.agree(read_counters(checkpoint), same, own_batch)
  steps_to_do = math.ceil((FLAGS.epochs * data.num_records - images_seen) / global_batch)
  last_step = min(first_step + steps_to_do, FLAGS.max_steps or math.inf)
  source = checkpoint or "the chief's checkpoint"
  if first_step >= last_step:
    data_input.say('nothing to do: %s is of step %d; raise --epochs or --max_steps to go on' % (source, first_step))
    return None

  model = build(
    data, devices, FLAGS.epochs, FLAGS.learning_rate, FLAGS.momentum, FLAGS.keep_prob, global_batch, workers.all_reduce
  )
  print_header(devices, global_batch, data, folder or "the chief's folder")
  resuming = 'resuming %s, step %d of %d' % (source, first_step, last_step)
  data_input.say(resuming if first_step else 'starting, %d steps' % last_step)
  if folder:
    network.mark_training(folder, done=False)
    saver = network.CheckpointWriter(folder, FLAGS.keep_checkpoints)
  stop = StopHook(model, last_step)
  saves = CheckpointHook(model.report, saver, FLAGS.save_steps, last_step)
  progress = ProgressHook(model.report, folder, last_step)
  train(workers, model, [stop, saves, progress], checkpoint, len(devices))
  return stop.signum


def main(_):
  members, own = read_tf_config(os.environ.get('TF_CONFIG', ''))
  do_other_work(own)
  devices = tower_devices(FLAGS.num_gpus)
  workers = AllReduce(members, own, len(devices)) if members else ALONE
  with workers.recovery(), tf.Graph().as_default(), tf.device(workers.device):
    signum = train_to_the_end(workers, devices)
  if signum:
    sys.exit(128 + signum)


if __name__ == '__main__':
  data_input.run(main, FLAGS, __doc__)
