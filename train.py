"""Trains VGG19 on CIFAR-10: one tower a GPU, gradients averaged, one update.

  python train.py                         all visible GPUs, or one tower on the CPU
  python train.py --num_gpus 4            four towers; without a GPU on virtual CPU devices, for trying
  TF_CONFIG=... python train.py           the same on each machine of a cluster, see the README
  tensorboard --logdir checkpoints        loss, accuracy, learning rate, images/s, queue fill

`--epochs 15`, 2 cores without a GPU: 78.1 % of the 10,000 test images; 34 minutes at 375 images/s.
Run again in the same folder, it goes on where it was. Ctrl-C or SIGTERM saves first.
"""

import collections
import functools
import glob
import json
import math
import os
import re
import select
import shutil
import signal
import socket
import sys
import threading
import time

from data_input import CLASSES, CROP_SIZE, data_input, default_threads, run, warn  # first: it imports TensorFlow quietly

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
# Of whole runs of 15 epochs, one seed each, 0.03 after a warm-up of 5 epochs with keep_prob 0.8 ended at 78.1 % (test), 0.01
# after a quarter of an epoch with keep_prob 0.5 at 75.1 %, still underfitting. 0.05, reached that soon, still stood at 2.30
# after 300 steps (two seeds).
flags.DEFINE_float('learning_rate', 0.03, 'peak, reached after the warm-up', 0, flag_values=FLAGS)
flags.DEFINE_float('momentum', 0.9, 'of the update', 0, 1, flag_values=FLAGS)
# At a peak of 0.01, cross-entropy at step 280 was 1.82 and 1.73 (two seeds); with 0.5 it was 1.90 and 1.86.
flags.DEFINE_float('keep_prob', 0.8, 'probability that dropout keeps a unit of fc6 and fc7', 1e-3, 1, flag_values=FLAGS)
flags.DEFINE_integer('save_steps', 400, 'steps between checkpoints', 1, flag_values=FLAGS)
flags.DEFINE_integer('keep_checkpoints', 5, 'newest checkpoints that stay on disk', 1, flag_values=FLAGS)
flags.DEFINE_integer('num_threads', default_threads(), 'preprocessing threads', 1, flag_values=FLAGS)
flags.DEFINE_integer('seed', None, 'of weights, order and augmentation (default: another each run)', flag_values=FLAGS)
for name in ('epochs', 'learning_rate', 'momentum', 'keep_prob'):
  flags.register_validator(name, math.isfinite, 'give a finite number', FLAGS)

# He-normal weights without batch norm leave the plateaus of the first two epochs, at 2.3 and 1.9, soonest at rates of about
# 0.01 or less. With keep_prob 0.5, cross-entropy at step 560 was 1.81 and 1.92 (two seeds) with 2 epochs of warm-up (rate
# 0.021), and 1.68 and 1.59 at a constant 0.01. Three epochs with keep_prob 0.8 gave 55.6 and 54.4 % (test) with this warm-up,
# 27.1 and 47.5 % with one of a quarter of an epoch.
WARMUP_EPOCHS = 5
SUMMARY_STEPS = 10  # steps that one TensorBoard point averages
LINE_SECONDS = 10  # between progress lines


# ---------------------------------------------------------------- devices


def tower_devices(num_gpus):
  """Devices of the towers. Raises flags.Error where more GPUs are asked for than there are."""
  visible = len(tf.config.experimental.list_physical_devices('GPU'))
  if not visible:
    towers = num_gpus or 1
    warn('TensorFlow sees no GPU: %d tower%s on the CPU, many times slower than a GPU. If there is one, start with '
         'TF_CPP_MIN_LOG_LEVEL=0 to read why it is not used' % (towers, ' runs' if towers == 1 else 's run'))  # fmt: skip
    return ['/cpu:%d' % i for i in range(towers)]
  if (num_gpus or 0) > visible:
    raise flags.Error('--num_gpus %d: only %d visible; give at most that' % (num_gpus, visible))
  return ['/gpu:%d' % i for i in range(num_gpus or visible)]


def variable_devices(devices):
  """Where variables live: spread over the GPUs, or on the first CPU device."""
  return devices if 'gpu' in devices[0] else devices[:1]


def spread(sizes, homes):
  """Where each variable lives: {name: one of `homes`}, from {name: bytes}; the largest first, each where least is."""
  load, where = dict.fromkeys(homes, 0), {}
  for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
    where[name] = min(homes, key=load.get)
    load[where[name]] += sizes[name]
  return where


def sizes_of_variables(num_classes):
  """{name: bytes} of the network's variables."""
  with tf.Graph().as_default():
    image_batch = tf.placeholder(tf.float32, [None, CROP_SIZE, CROP_SIZE, 3])
    network.NETWORK(image_batch, None, 1, num_classes, True)
    return {variable.op.name: variable.shape.num_elements() * variable.dtype.size for variable in tf.trainable_variables()}


def place(tower, where):
  """Device function: a variable goes where `where`, {name: device}, says, the rest to `tower`."""

  def device(op):
    if op.device:
      return op.device  # pinned by an inner scope: the input, to the CPU
    return where[op.name] if op.type == 'VarHandleOp' else tower

  return device


# ---------------------------------------------------------------- graph


def learning_rate(images_seen, num_records, epochs, peak):
  """Linear warm-up to `peak`, then half a cosine to 0 at the end of the last epoch: a function of images seen alone.

  `images_seen`: integer tensor, those of the coming update included. Returns a float32 scalar.
  """
  epoch = tf.cast(images_seen, tf.float32) / num_records
  warmup = min(WARMUP_EPOCHS, epochs / 2)
  progress = tf.clip_by_value((epoch - warmup) / (epochs - warmup), 0.0, 1.0)
  return peak * tf.minimum(epoch / warmup, 0.5 + 0.5 * tf.cos(math.pi * progress))


def average_gradients(tower_grads, device=None):
  """Mean of each variable's gradients over the towers, computed on `device`, else where the variable lives.

  Args:
    tower_grads: a list over towers of [(gradient, variable)], in the same order of variables.
  Returns:
    [(mean gradient, variable)].
  Raises:
    ValueError: a gradient is None; the message names the variable.
  """
  average = []
  for pairs in zip(*tower_grads):
    gradients, variable = [gradient for gradient, _ in pairs], pairs[0][1]
    if any(gradient is None for gradient in gradients):
      raise ValueError('a tower has no gradient of %s: its loss does not depend on it' % variable.op.name)
    with tf.device(device or variable.device):
      mean = gradients[0] if len(gradients) == 1 else tf.add_n(gradients) / len(gradients)
    average.append((mean, variable))
  return average


def tower_loss(data, keep_prob):
  """One tower on its own batch: the network, and the fraction of the batch that it has right."""
  image_batch, label_batch = data.next_batch()
  tower = network.NETWORK(image_batch, label_batch, keep_prob, data.num_classes, True)
  right = tf.equal(tf.argmax(tower.logits, 1), tf.argmax(label_batch, 1))
  return tower, tf.reduce_mean(tf.cast(right, tf.float32))


Model = collections.namedtuple('Model', 'train_op report finite')


def build(data, devices, epochs, peak, momentum, keep_prob, cluster=None):
  """The training graph: a tower on each of `devices`, fed from the queue of `data`.

  With a `Cluster`, the variables live on its parameter servers and are updated by its chief with the means over its
  workers; train_op of another worker gives its share, and its loss, as the chief's, is that of its own towers.

  Returns:
    Model: train_op; report, a dict of scalars after the update (step, images_seen, epoch, loss, cross_entropy,
    accuracy, learning_rate, queue_fill), means over the towers; finite, bool: loss and gradients are.
  """
  homes, here = (cluster.homes, cluster.device + '/cpu:0') if cluster else (variable_devices(devices), None)
  counters = homes[0] if cluster else '/cpu:0'
  with tf.device(counters):
    global_step = tf.train.get_or_create_global_step()
    images_seen = tf.get_variable('images_seen', [], tf.int64, tf.zeros_initializer(), trainable=False, use_resource=True)
    own_images = len(devices) * data.batch_size
    seen_after = images_seen + (cluster.images(own_images) if cluster else own_images)
    rate = learning_rate(seen_after, data.num_records, epochs, peak)
  optimizer = tf.train.MomentumOptimizer(rate, momentum)

  # With one home the sizes are no matter, and to find them costs a network.
  where = spread(sizes_of_variables(data.num_classes), homes) if len(homes) > 1 else collections.defaultdict(lambda: homes[0])
  towers, accuracies, tower_grads = [], [], []
  for i, device in enumerate(devices):
    with tf.device(place(device, where)), tf.name_scope('tower_%d' % i):
      # From parameter servers each variable is fetched once a step, not once a tower.
      with tf.variable_scope('', reuse=i > 0, caching_device=here):
        tower, accuracy = tower_loss(data, keep_prob)
      tower_grads.append(optimizer.compute_gradients(tower.losses, tf.trainable_variables()))
      towers.append(tower)
      accuracies.append(accuracy)
  gradients = average_gradients(tower_grads, here)
  if cluster:
    contribute, gradients = cluster.average(gradients)
  # An update must copy a variable whose old value is still to be used; a cluster's chief computes its loss in an earlier run.
  with tf.control_dependencies([] if cluster else [tower.losses for tower in towers]):
    update = optimizer.apply_gradients(gradients, global_step)

  with tf.device('/cpu:0'):
    cross_entropy = tf.add_n([tower.cross_entropy for tower in towers]) / len(towers)
    loss = tf.add_n([tower.losses for tower in towers]) / len(towers)
    # A layer's bias gradient sums all that flows back through it, so these small ones show a NaN in any.
    small = [loss] + [gradient for gradient, variable in gradients if variable.shape.ndims == 1]
    finite = tf.reduce_all([tf.reduce_all(tf.is_finite(value)) for value in small])
    with tf.device(counters), tf.control_dependencies([update]):
      train_op = tf.assign(images_seen, seen_after).op
    if cluster and not cluster.is_chief:
      train_op = contribute
    with tf.device(counters), tf.control_dependencies([train_op]):
      step, seen = global_step.read_value(), images_seen.read_value()
    report = {
      'step': step, 'images_seen': seen, 'epoch': seen / data.num_records, 'loss': loss, 'cross_entropy': cross_entropy,
      'accuracy': tf.add_n(accuracies) / len(towers), 'learning_rate': rate, 'queue_fill': data.queue_fill}  # fmt: skip
  return Model(train_op, report, finite)


# ---------------------------------------------------------------- several machines

DONE, LEFT = -1, -2  # what stands on the board instead of a ticket when training is over, or a worker has left
POLL_SECONDS = 0.01  # least time between looks at the board
WAIT_SECONDS = 10  # without progress before a line says who does not answer
LONG_SECONDS = 60  # without progress before a line says what is waited for, though all answer
GRACE_SECONDS = 20  # that a parameter server leaves the chief to save; Kubernetes gives 30 in all
LOST = (tf.errors.UnavailableError, tf.errors.AbortedError)  # what a session raises where a parameter server is gone
CLUSTER_JOBS = 'ps', 'chief', 'worker'


def read_tf_config(text):
  """What TF_CONFIG says: ({job: [host:port]}, job, index) of this process, or None where it is alone.

  The cluster has no 'evaluator', but the job may be that. Raises flags.Error with what is wrong.
  """
  try:
    config = json.loads(text or '{}')
  except ValueError as error:
    raise flags.Error('TF_CONFIG is no JSON (%s): %s' % (error, text))
  if not isinstance(config, dict) or not all(isinstance(config.get(key, {}), dict) for key in ('cluster', 'task')):
    raise flags.Error('TF_CONFIG must be {"cluster": {...}, "task": {...}}, not %s' % text)
  jobs = {job: hosts for job, hosts in config.get('cluster', {}).items() if job != 'evaluator'}
  for job, hosts in jobs.items():
    if job not in CLUSTER_JOBS:
      raise flags.Error("TF_CONFIG: no job '%s' is known: use %s or evaluator" % (job, ', '.join(CLUSTER_JOBS)))
    addresses = hosts if isinstance(hosts, list) else [hosts]
    wrong = [host for host in addresses if not re.match(r'.+:\d+$', str(host))]
    if wrong or addresses is not hosts or not hosts:
      raise flags.Error('TF_CONFIG: "%s" must be a list of "host:port", not %s' % (job, json.dumps(hosts)))
  task = config.get('task', {})
  job, index = task.get('type'), task.get('index', 0)
  if job == 'evaluator':
    return jobs, job, index
  if jobs and task:
    index = int(index) if str(index).isdigit() else None
    if not isinstance(job, str) or index not in range(len(jobs.get(job, []))):
      raise flags.Error('TF_CONFIG: its task %s is not in its cluster %s' % (json.dumps(task), json.dumps(jobs)))
  workers = len(jobs.get('chief', [])) + len(jobs.get('worker', []))
  if not jobs or (workers == 1 and 'ps' not in jobs):
    return None
  if not task:
    raise flags.Error('TF_CONFIG has no "task": it says which part of the cluster this process is')
  if 'ps' not in jobs or not workers or len(jobs.get('chief', [])) > 1:
    raise flags.Error('TF_CONFIG: a cluster takes "ps", workers, and at most one "chief", not %s' % json.dumps(jobs))
  return jobs, job, index


def answers(address):
  """Whether a process listens at host:port."""
  host, port = address.rsplit(':', 1)
  try:
    socket.create_connection((host.strip('[]'), int(port)), 2).close()
    return True
  except (OSError, ValueError, OverflowError):  # the others for what can be no host name or port
    return False


class Cluster(tf.train.SessionRunHook):
  """This process's part in a cluster of parameter servers and workers, one of which is the chief.

  tf.train.SyncReplicasOptimizer would let a fast worker give the share of a slow one, and waits for ever for a dead one.
  Here each worker gives one gradient an update. The first parameter server holds a board: the chief puts a ticket
  on it; a worker that sees a new one computes its gradients, adds them to accumulators where the variables live, and
  writes the ticket under its own name. When all members have, the chief takes the means, updates the variables and puts
  up the next ticket. Accumulators drop gradients of older tickets, as from before a chief's restart. Who has not written
  and does not answer at its address any more is no member until it writes again.

  Where a parameter server is lost, chief and workers start again as new processes: the chief resumes from its checkpoint.
  As a hook, it lets the chief begin, and all end, in order.
  """

  def __init__(self, jobs, job, index):
    self._jobs, self._job, self._index = jobs, job, index
    self.workers = [(job, i) for job in ('chief', 'worker') for i in range(len(jobs.get(job, [])))]
    self.is_chief = (job, index) == self.workers[0]
    self.device = self._device(job, index)
    self.homes = [self._device('ps', i) + '/cpu:0' for i in range(len(jobs['ps']))]
    self._members, self._seen, self._ticket, self._begun = set(self.workers), {}, 0, False
    self._awaited, self._since, self._said = [], time.time(), 0

  @staticmethod
  def _device(job, index):
    return '/job:%s/task:%d' % (job, index)

  def _name(self, task):
    return '%s %d at %s' % (task + (self._jobs[task[0]][task[1]],))

  def _answers(self, task):
    return answers(self._jobs[task[0]][task[1]])

  @property
  def rank(self):
    """This worker's place among the workers; the chief's is 0."""
    return self.workers.index((self._job, self._index))

  def start(self, config):
    """Starts TensorFlow's server of this process. Raises flags.Error where its port is taken."""
    own = self._job, self._index
    port = int(self._jobs[self._job][self._index].rsplit(':', 1)[1])
    try:  # TensorFlow's own error prints a page of its C++ part
      with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(('', port))
      self._server = tf.train.Server(tf.train.ClusterSpec(self._jobs), self._job, self._index, config=config)
    except (OSError, OverflowError, tf.errors.OpError) as error:
      raise flags.Error('TF_CONFIG: %s cannot listen on port %d: %s' % (self._name(own), port, error))
    self.target = self._server.target
    self._signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    threading.Thread(target=self.watch, daemon=True).start()
    print('%s listens' % self._name(own), file=sys.stderr)

  def session_config(self, num_cpus=1):
    """For sessions that depend on this process and the parameter servers alone."""
    config = network.session_config(num_cpus)
    config.device_filters.extend(['/job:ps', self.device])
    return config

  # ---- parameter servers

  def _leave_queue(self, home):
    with tf.device(home):
      return tf.FIFOQueue(1, tf.bool, [[]], shared_name='leave')

  def serve(self):
    """A parameter server's work: waits until the chief sends it home and all workers have ended. Returns a signal that ended it
    instead, or None.

    Where all processes get the signal at once, it stays until the chief has saved.
    """
    config, signals = tf.ConfigProto(device_count={'GPU': 0}, device_filters=[self.device]), []
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, lambda number, _: signals.append((number, time.time())))
    self.start(config)
    with tf.Graph().as_default():
      told = self._leave_queue(self.device + '/cpu:0').size()
      with tf.Session(self.target, config=config) as session:
        while not session.run(told):
          late = len(signals) > 1 or (signals and time.time() > signals[0][1] + GRACE_SECONDS)
          if late or (signals and not self._answers(self.workers[0])):
            return signals[0][0]
          self._await()
          time.sleep(0.5)
    # Who closes a session still needs the servers: TensorFlow 1.15 waits for ever for one that is gone.
    end, before = time.time() + LONG_SECONDS, len(signals)
    while time.time() < end and len(signals) == before and any(map(self._answers, self.workers)):
      self._await()
      time.sleep(0.2)

  # ---- the graph of a worker

  def images(self, own):
    """int64: how many images the coming update takes, `own` of them from this worker; as long as it is not fed, a guess."""
    self._own_images = own
    self._fed_images = tf.placeholder_with_default(np.int64(own * len(self.workers)), [], 'images')
    return self._fed_images

  def average(self, gradients):
    """Makes the accumulators and the board. Returns the op that adds `gradients`, and the means over the workers."""
    accumulators, applied, averages = [], [], []
    self._fed_ticket = tf.placeholder(tf.int64, [], 'ticket')
    self._fed_workers = tf.placeholder_with_default(len(self.workers), [], 'workers')
    for gradient, variable in gradients:
      with tf.device(variable.device):
        name = variable.op.name + '/accumulator'
        accumulators.append(tf.ConditionalAccumulator(gradient.dtype, variable.shape, shared_name=name))
        applied.append(accumulators[-1].apply_grad(gradient, local_step=self._fed_ticket))
        averages.append((accumulators[-1].take_grad(self._fed_workers), variable))
    with tf.device(self.homes[0]), tf.variable_scope('board'):
      # In a collection of its own: it is no part of the model and of its checkpoints.
      new = functools.partial(tf.get_variable, shape=[], dtype=tf.int64, initializer=tf.zeros_initializer(), trainable=False,
                              use_resource=True, collections=['board'])  # fmt: skip
      ticket, entries = new('ticket'), [new('%s_%d' % worker) for worker in self.workers]
      images = [new('%s_%d_images' % worker) for worker in self.workers]
      self._clear_board = tf.variables_initializer([ticket] + entries + images)
      self._read_ticket, self._read_signed = ticket.read_value(), [entry.read_value() for entry in entries]
      with tf.control_dependencies(self._read_signed):  # written before the entry, read after it
        self._read_board = self._read_signed, [count.read_value() for count in images]
      self._put_ticket, self._sign = (entry.assign(self._fed_ticket).op for entry in (ticket, entries[self.rank]))
      own_images = images[self.rank].assign(self._own_images)
      with tf.control_dependencies(applied + [own_images.op]):
        self._contribute = entries[self.rank].assign(self._fed_ticket).op
    self._set_tickets = [accumulator.set_global_step(self._fed_ticket) for accumulator in accumulators]
    self._count = [accumulator.num_accumulated() for accumulator in accumulators]
    self._discard = [accumulator.take_grad(1).op for accumulator in accumulators]
    self._send_home = [self._leave_queue(home).enqueue(True) for home in self.homes]
    return self._contribute, averages

  # ---- running it

  def _await(self, *tasks):
    self._awaited, self._since = list(tasks), time.time()

  @staticmethod
  def _pause(since):
    """Sleeps before the next look at the board: a twentieth of the wait so far, 0.5 s at most.

    A look takes milliseconds of this process and of a server, which may share their machine with those that are waited for.
    """
    time.sleep(min(max(POLL_SECONDS, 0.05 * (time.time() - since)), 0.5))

  def watch(self):
    """A thread that says in a line what is waited for, whenever nothing has moved for some time.

    It also ends the process by a signal where the main thread cannot: in a call that waits for a lost parameter server.
    """
    signum = None
    while True:
      if select.select([self._signals], [], [], 1)[0]:
        signum = os.read(self._signals, 1)[0]
      now = time.time()
      if not signum and now < max(self._since, self._said) + WAIT_SECONDS:
        continue
      servers = [('ps', i) for i in range(len(self._jobs['ps']))]
      lost = [task for task in servers if not self._answers(task)]
      if signum and lost:
        os._exit(128 + signum)
      waiting = lost or [task for task in self._awaited if not self._answers(task)]
      if not waiting and now > self._since + LONG_SECONDS:
        waiting = self._awaited or servers
      if waiting and not signum:
        tqdm.write('waiting for ' + ', '.join(map(self._name, waiting)), file=sys.stderr)
      self._said = now

  def after_create_session(self, session, _):
    """The chief, once the variables have their values: drops the gradients that earlier runs left behind."""
    if not self.is_chief:
      return
    last = 0
    try:
      last = session.run(self._read_ticket)
    except tf.errors.FailedPreconditionError:
      session.run(self._clear_board)
    # Of a chief before this one; it had all workers, and who is dead need not be waited for.
    self._begun = last > 0
    # The clock counts more than there are updates, so no ticket of an earlier run is as high, on whatever server.
    self._ticket = max(int(time.time() * 1000), last) + 1
    session.run(self._set_tickets, {self._fed_ticket: self._ticket})
    for count, discard in zip(session.run(self._count), self._discard):
      if count:
        session.run(discard)  # which counts as an update there
    self._ticket += 1
    session.run(self._set_tickets, {self._fed_ticket: self._ticket})

  def step(self, model, stop):
    """Returns the function that does a step of this worker: for MonitoredSession.run_step_fn."""
    self._model, self._stop = model, stop
    own_step = self._chief_step if self.is_chief else self._worker_step

    def step_fn(step_context):
      try:
        return own_step(step_context)
      except LOST:  # before MonitoredSession sees it, which would make a session from the old start
        self.start_again()

    return step_fn

  def start_again(self):
    """After the loss of a parameter server: a new process in place of this one, or the end where a signal has come."""
    if self._stop.signum:
      warn('lost a parameter server; the steps since the last save are lost')
    else:
      warn('lost a parameter server; starting again')
    sys.stderr.flush()
    if self._stop.signum:
      os._exit(128 + self._stop.signum)
    os.execv(sys.executable, [sys.executable] + sys.argv)

  def _chief_step(self, context):
    ticket = {self._fed_ticket: self._ticket}
    context.session.run(self._put_ticket, ticket)
    own = [self._model.report[name] for name in ('loss', 'cross_entropy', 'accuracy', 'queue_fill')]
    values = context.session.run(own + [self._contribute], ticket)
    # What this worker's run gave is fed to the update's run, which would compute it again.
    feeds = dict(zip(own, values))
    given = self._wait_for_members(context.session)
    if self._stop.signum:
      context.request_stop()
    feeds[self._fed_workers], feeds[self._fed_images] = len(given), sum(given)
    context.run_with_hooks(self._model.train_op, feeds)
    self._begun, self._ticket = True, self._ticket + 1
    self._await()

  def _wait_for_members(self, session):
    """Returns how many images each has contributed, once all members have; or None where a signal stops training."""
    began = time.time()
    probe = began + 1
    while not self._stop.signum:
      signed, images = session.run(self._read_board)
      entries = dict(zip(self.workers, signed))
      for worker, entry in entries.items():
        if entry == LEFT and worker in self._members and self._begun:
          self._dismiss(worker, 'has left')
        elif entry != self._seen.get(worker, entry) and entry != LEFT and worker not in self._members:
          self._members.add(worker)
          tqdm.write('%s is back' % self._name(worker), file=sys.stderr)
      self._seen = entries
      self._awaited = [worker for worker in self.workers if worker in self._members and entries[worker] != self._ticket]
      if not self._awaited:
        return [count for entry, count in zip(signed, images) if entry == self._ticket]
      if self._begun and time.time() > probe:
        for worker in self._awaited:
          if not self._answers(worker):
            self._dismiss(worker, 'does not answer')
        probe = time.time() + 1
      self._pause(began)

  def _dismiss(self, worker, reason):
    self._members.discard(worker)
    warn('%s %s: training goes on without it' % (self._name(worker), reason))

  def _worker_step(self, context):
    began = time.time()
    self._await(self.workers[0])
    while not self._stop.signum:
      try:
        ticket = context.session.run(self._read_ticket)
        # A restarted worker goes on from what the process before it has written.
        self._ticket = self._ticket or context.session.run(self._read_signed[self.rank])
        if ticket == DONE:
          context.request_stop()
        if ticket > 0 and ticket != self._ticket:
          self._await()
          context.run_with_hooks(self._model.train_op, {self._fed_ticket: ticket})
          self._ticket = ticket
          return
      except tf.errors.FailedPreconditionError:
        # The chief has not set the variables, on this server or on any.
        self._awaited, self._since = self.workers[:1], began
      self._pause(began)
    context.request_stop()

  def end(self, session):
    """A worker says that it leaves; the chief, after the last step, that training is done, and sends all home."""
    if not self.is_chief:
      session.run(self._sign, {self._fed_ticket: LEFT})
    elif self._stop.done:
      session.run(self._put_ticket, {self._fed_ticket: DONE})
      self._await(*self.workers[1:])
      while self._awaited:
        entries = dict(zip(self.workers, session.run(self._read_signed)))
        # Who has been here and does not answer has ended; who has not been here yet would wait for the servers.
        self._awaited = [worker for worker in self.workers[1:]
                         if entries[worker] != LEFT and not (self._begun and not self._answers(worker))]  # fmt: skip
        self._pause(self._since)
      session.run(self._send_home)


# ---------------------------------------------------------------- hooks


def reason_of(error):
  """Of TensorFlow's page about the graph only what the file system said, which stands before the node's name."""
  return re.search(r'([^\n]*?)\s*\[\[|$', str(error)).group(1) or error


class StopHook(tf.train.SessionRunHook):
  """Ends training after the last step, or after the running one where SIGINT or SIGTERM comes."""

  def __init__(self, report, counts, saves=True):
    self._fetch, self._last_step, self._saves = [report['step'], report['images_seen']], counts.last_step, saves
    self.signum, self.done = None, counts.first_step >= counts.last_step(counts.first_step, counts.images_seen)

  def begin(self):
    self._previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}

  def _on_signal(self, signum, _):
    self.signum = signum
    # Not print, which a signal may have interrupted.
    os.write(2, os.isatty(2) * b'\n' + b'stopping after this step' + self._saves * b' and a save' + b'\n')
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def before_run(self, _):
    return tf.train.SessionRunArgs(self._fetch)

  def after_run(self, run_context, values):
    self.done = values.results[0] >= self._last_step(*values.results)
    if self.signum or self.done:
      run_context.request_stop()


class CheckpointHook(tf.train.SessionRunHook):
  """Saves every `save_steps` steps and at the end; numbers that are not finite end training and are never saved."""

  def __init__(self, model, folder, save_steps, keep_checkpoints):
    self._fetch = [model.report['step'], model.finite]
    self._folder, self._save_steps = folder, save_steps
    self._saver, self._surplus = make_saver(folder, keep_checkpoints)

  def begin(self):
    finite = []
    for variable in tf.global_variables():
      with tf.device(variable.device):
        if variable.dtype.is_floating:
          finite.append(tf.reduce_all(tf.is_finite(variable.value())))
    self._all_finite = tf.reduce_all(finite)

  def after_create_session(self, session, _):
    self._saved = self._step = session.run(tf.train.get_global_step())

  def before_run(self, _):
    return tf.train.SessionRunArgs(self._fetch)

  def after_run(self, run_context, values):
    self._step, finite = values.results
    if not finite:
      self._fail()
    if self._step >= self._saved + self._save_steps:
      self._save(run_context.session)

  def end(self, session):
    if self._step > self._saved:
      self._save(session)
    if self._saved:
      tqdm.write('saved step %d in %s' % (self._saved, self._folder), file=sys.stderr)

  def _save(self, session):
    if not session.run(self._all_finite):
      self._fail()
    prefix = os.path.join(self._folder, 'model.ckpt')
    try:
      self._saver.save(session, prefix, self._step, write_meta_graph=False)
    except LOST:
      raise
    except (tf.errors.OpError, ValueError) as error:
      remove_unfinished_saves(self._folder)
      raise flags.Error('cannot save step %d in %s: %s' % (self._step, self._folder, reason_of(error)))
    self._saved = self._step
    while self._surplus:
      tf.train.remove_checkpoint(self._surplus.pop())

  def _fail(self):
    raise flags.Error(
      'step %d: loss, gradients or weights are not finite, and nothing was saved since step %d. '
      'Lower --learning_rate; started again, training resumes at that step' % (self._step, self._saved))  # fmt: skip


class ProgressHook(tf.train.SessionRunHook):
  """Shows progress on stderr, lines and on a terminal a bar below them, and writes it for TensorBoard.

  With `own_batch`, of a worker that is not the chief: its own images/s, and nothing for TensorBoard.
  """

  def __init__(self, report, folder, counts, own_batch=None):
    self._report, self._folder, self._own_batch = report, folder, own_batch
    self._first_step, self._images_seen, self._last_step = counts

  def after_create_session(self, session, _):
    self._writer = None
    if not self._own_batch:
      self._writer = tf.summary.FileWriter(self._folder, session.graph)
      # Points that a killed run wrote beyond this step are not shown twice.
      self._writer.add_session_log(tf.SessionLog(status=tf.SessionLog.START), self._first_step)
    self._bar = tqdm(total=self._last_step(self._first_step, self._images_seen), initial=self._first_step,
                     disable=not sys.stderr.isatty(), bar_format='{percentage:3.0f}%|{bar:30}| {desc}')  # fmt: skip
    self._since, self._line_time, self._points = time.time(), 0, []

  def before_run(self, _):
    return tf.train.SessionRunArgs(self._report)

  def after_run(self, _, values):
    self._points.append(values.results)
    step = values.results['step']
    last_step = self._last_step(step, values.results['images_seen'])
    # The first step fills the queue and warms up, so its images/s stands alone.
    if step % SUMMARY_STEPS == 0 or step in (self._first_step + 1, last_step):
      self._show(self._points[-1], len(self._points), last_step)

  def _show(self, last, steps, last_step):
    now = time.time()
    mean = {name: float(np.mean([point[name] for point in self._points])) for name in self._report}
    images = steps * self._own_batch if self._own_batch else last['images_seen'] - self._images_seen
    mean['images_per_second'] = images / (now - self._since)
    left = (last_step - last['step']) * (now - self._since) / steps
    self._since, self._points, self._images_seen = now, [], last['images_seen']
    values = [tf.Summary.Value(tag=tag, simple_value=mean[tag]) for tag in mean if tag not in ('step', 'images_seen')]
    self._write(lambda: self._writer.add_summary(tf.Summary(value=values), last['step']))
    text = ('step {step}/{last_step}  epoch {epoch:.2f}  loss {loss:.3f} (cross-entropy {cross_entropy:.3f})  accuracy '
            '{accuracy:.1%}  learning rate {learning_rate:.5f}  queue {queue_fill:.0%}  {images_per_second:.0f} images/s{here}  {left} left'
            ).format(**dict(mean, here=' here' if self._own_batch else '', step=last['step'], last_step=last_step, epoch=last['epoch'],
                            left=tqdm.format_interval(left)))  # fmt: skip
    self._bar.total = last_step
    self._bar.update(last['step'] - self._bar.n)
    self._bar.set_description_str('step %d/%d  %s left' % (last['step'], last_step, tqdm.format_interval(left)))
    if now > self._line_time + LINE_SECONDS or last['step'] == last_step:
      self._line_time = now
      tqdm.write(text, file=sys.stderr)

  def _write(self, action):
    """Summaries are worth a warning where they cannot be written (a full disk), not the run."""
    try:
      if self._writer:
        action()
    except (RuntimeError, OSError, tf.errors.OpError) as error:
      self._writer = None
      warn('no more summaries for TensorBoard: %s' % error)

  def end(self, _):
    self._bar.close()
    self._write(lambda: self._writer.close())


# ---------------------------------------------------------------- the run


def remove_unfinished_saves(folder):
  """Deletes what a save that was killed or found the disk full left behind; it is of no use and may be 300 MB."""
  for path in glob.glob(os.path.join(folder, 'model.ckpt-*temp*')):  # _temp_ folders, 2.x: .tempstate files
    shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def make_saver(folder, keep_checkpoints):
  """Saver that keeps the newest `keep_checkpoints`, those of earlier runs in `folder` among them.

  Returns it, and those of earlier runs that are too many already: they go once there is a newer one.
  """
  saver = tf.train.Saver(max_to_keep=keep_checkpoints, save_relative_paths=True)
  earlier = [os.path.join(folder, name) for name in network.named_checkpoints(folder)[1]]
  saver.recover_last_checkpoints(earlier[-keep_checkpoints:])
  return saver, earlier[:-keep_checkpoints]


def train(folder, start, model, devices, counts, cluster):
  """Runs steps until the last one or a signal; the chief, or who is alone, saves in `folder`.

  Returns the signal's number, or None.
  """
  leads = not cluster or cluster.is_chief
  # To the others the chief says when it is over.
  stop = StopHook(model.report, counts if leads else counts._replace(last_step=lambda *_: math.inf), saves=leads)
  options = {'config': network.session_config(len(devices)), 'log_step_count_steps': None}
  ready, do_step = tf.constant([], tf.string), lambda step_context: step_context.run_with_hooks(model.train_op)
  if cluster:
    options.update(config=cluster.session_config(len(devices)), master=cluster.target, is_chief=cluster.is_chief)
    do_step = cluster.step(model, stop)
  if leads:
    os.makedirs(folder, exist_ok=True)
    remove_unfinished_saves(folder)
    network.mark_training(folder, done=False)
    hooks = [stop, CheckpointHook(model, folder, FLAGS.save_steps, FLAGS.keep_checkpoints),
             ProgressHook(model.report, folder, counts)]  # fmt: skip
  else:
    hooks = [stop, ProgressHook(model.report, None, counts, len(devices) * FLAGS.batch_size)]
  if cluster:
    hooks.append(cluster)
  variables = tf.global_variables()
  scaffold = tf.train.Scaffold(init_fn=lambda _, session: start and network.restore(session, variables, start), ready_op=ready,
                               ready_for_local_init_op=ready)  # fmt: skip
  try:
    with tf.train.MonitoredTrainingSession(scaffold=scaffold, hooks=hooks, **options) as session:
      while not (leads and stop.done) and not session.should_stop():
        session.run_step_fn(do_step)
  except LOST:
    if not cluster:
      raise
    cluster.start_again()
  except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError, tf.errors.DataLossError) as error:
    raise flags.Error('reading the training data failed: %s' % reason_of(error))
  if leads and stop.done:
    network.mark_training(folder, done=True)
  return stop.signum


Counts = collections.namedtuple('Counts', 'first_step images_seen last_step')


def steps_to_do(start, num_records, global_batch):
  """Global step and images seen at which this run begins, 0 or of the checkpoint `start`, and when it ends.

  Returns:
    Counts: last_step is a function of the global step and the images seen by then. Alone it always gives the same step. A
    cluster may take fewer images in a step, while a worker is out: the end is when the images of --epochs are seen.
  """
  first_step, images_seen = 0, 0
  if start:
    counters = [tf.train.get_global_step(), tf.global_variables('images_seen')[0]]
    first_step, images_seen = (int(value) for value in network.read_values(start, counters)[1])

  def last_step(step, images_seen):
    to_do = max(0, math.ceil((FLAGS.epochs * num_records - images_seen) / global_batch))
    return min(step + to_do, FLAGS.max_steps or math.inf)

  return Counts(first_step, images_seen, last_step)


def print_header(devices, global_batch, data, folder):
  parameters = sum(variable.shape.num_elements() for variable in tf.trainable_variables())
  print('TensorFlow %s; %d tower(s) on %s; global batch %d; VGG19 with %s parameters\n'
        '%d records in %s; checkpoints and summaries in %s'
        % (tf.__version__, len(devices), ' '.join(devices), global_batch, format(parameters, ','),
           data.num_records, os.path.dirname(data.filenames[0]), folder), file=sys.stderr)  # fmt: skip


def main(_):
  jobs, job, index = read_tf_config(os.environ.get('TF_CONFIG', '')) or (None, None, None)
  if job == 'evaluator':
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'val.py')
    os.execv(
      sys.executable,
      [sys.executable, script, '--watch', '--data_dir', FLAGS.data_dir, '--checkpoint_dir', FLAGS.checkpoint_dir],
    )
  cluster = Cluster(jobs, job, index) if jobs else None
  if job == 'ps':
    signum = cluster.serve()
    sys.exit(signum and 128 + signum)
  leads = not cluster or cluster.is_chief
  start = network.resume_point(FLAGS.checkpoint_dir) if leads else None
  folder = os.path.dirname(start) or '.' if start else FLAGS.checkpoint_dir
  devices = tower_devices(FLAGS.num_gpus)
  workers = len(cluster.workers) if cluster else 1
  global_batch = workers * len(devices) * FLAGS.batch_size
  with tf.Graph().as_default(), tf.device(cluster and cluster.device):
    tf.set_random_seed(FLAGS.seed if FLAGS.seed is None or leads else FLAGS.seed + cluster.rank)
    data = data_input(FLAGS.data_dir, FLAGS.batch_size, len(CLASSES), True, FLAGS.num_threads)
    model = build(data, devices, FLAGS.epochs, FLAGS.learning_rate, FLAGS.momentum, FLAGS.keep_prob, cluster)
    counts = steps_to_do(start, data.num_records, global_batch)
    first_step, last_step = counts.first_step, counts.last_step(counts.first_step, counts.images_seen)
    print_header(devices, global_batch, data, folder)
    if first_step >= last_step:
      print(
        'nothing to do: %s has reached step %d; raise --epochs or --max_steps to go on' % (start, first_step), file=sys.stderr
      )
      if not cluster:
        return
    if leads:
      print('resuming %s, step %d of %d' % (start, first_step, last_step) if start else 'starting, %d steps' % last_step,
            file=sys.stderr)  # fmt: skip
    if cluster:
      cluster.start(network.session_config(len(devices)))
    signum = train(folder, start, model, devices, counts, cluster)
  if signum:
    sys.exit(128 + signum)


if __name__ == '__main__':
  run(main, FLAGS, __doc__)
