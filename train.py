"""Trains VGG19 on CIFAR-10: one tower a GPU, gradients averaged, one update.

  python train.py                         all visible GPUs, or one tower on the CPU
  python train.py --num_gpus 4            four towers; without a GPU on virtual CPU devices, for trying
  tensorboard --logdir checkpoints        loss, accuracy, learning rate, images/s, queue fill

Run again in the same folder, it goes on where it was. Ctrl-C or SIGTERM saves first.
"""

import collections
import glob
import math
import os
import re
import shutil
import signal
import sys
import time

from data_input import CLASSES, data_input, default_threads, run  # first: it imports TensorFlow quietly

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
flags.DEFINE_float('keep_prob', 0.5, 'probability that dropout keeps a unit of fc6 and fc7', 1e-3, 1, flag_values=FLAGS)
flags.DEFINE_integer('save_steps', 400, 'steps between checkpoints', 1, flag_values=FLAGS)
flags.DEFINE_integer('keep_checkpoints', 5, 'newest checkpoints that stay on disk', 1, flag_values=FLAGS)
flags.DEFINE_integer('num_threads', default_threads(), 'preprocessing threads', 1, flag_values=FLAGS)
flags.DEFINE_integer('seed', None, 'of weights, order and augmentation (default: another each run)', flag_values=FLAGS)
for name in ('epochs', 'learning_rate', 'momentum', 'keep_prob'):
  flags.register_validator(name, math.isfinite, 'give a finite number', FLAGS)

WARMUP_EPOCHS = 1  # at full rate from the start, He-normal weights without batch norm often diverge
SUMMARY_STEPS = 10  # steps that one TensorBoard point averages
LINE_SECONDS = 10  # between progress lines where stderr is no terminal


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


def place(tower, homes, load):
  """Device function: a variable goes to that of `homes` with the least `load` (bytes; kept up to date), the rest to `tower`."""

  def device(op):
    if op.device:
      return op.device  # pinned by an inner scope: the input, to the CPU
    if op.type != 'VarHandleOp':
      return tower
    least = min(homes, key=lambda home: load[home])
    load[least] += tf.TensorShape(op.get_attr('shape')).num_elements() * op.get_attr('dtype').size
    return least

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


def average_gradients(tower_grads):
  """Mean of each variable's gradients over the towers, computed where the variable lives.

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
    with tf.device(variable.device):
      mean = gradients[0] if len(gradients) == 1 else tf.add_n(gradients) / len(gradients)
    average.append((mean, variable))
  return average


def add_weight_decay(gradients, weight_decay):
  """Adds the gradient of the decay, once for all towers and where each variable lives."""
  decayed = []
  for gradient, variable in gradients:
    with tf.device(variable.device):
      decay = tf.gradients(weight_decay, variable)[0]
      decayed.append((gradient if decay is None else gradient + decay, variable))
  return decayed


def tower_loss(data, keep_prob):
  """One tower on its own batch: the network, and the fraction of the batch that it has right."""
  image_batch, label_batch = data.next_batch()
  tower = network.NETWORK(image_batch, label_batch, keep_prob, data.num_classes, True)
  right = tf.equal(tf.argmax(tower.logits, 1), tf.argmax(label_batch, 1))
  return tower, tf.reduce_mean(tf.cast(right, tf.float32))


Model = collections.namedtuple('Model', 'train_op report finite')


def build(data, devices, epochs, peak, momentum, keep_prob):
  """The training graph: a tower on each of `devices`, fed from the queue of `data`.

  Returns:
    Model: train_op; report, a dict of scalars after the update (step, images_seen, epoch, loss, cross_entropy,
    accuracy, learning_rate, queue_fill), means over the towers; finite, bool: loss and gradients are.
  """
  with tf.device('/cpu:0'):
    global_step = tf.train.get_or_create_global_step()
    images_seen = tf.get_variable('images_seen', [], tf.int64, tf.zeros_initializer(), trainable=False, use_resource=True)
    seen_after = images_seen + len(devices) * data.batch_size
    rate = learning_rate(seen_after, data.num_records, epochs, peak)
  optimizer = tf.train.MomentumOptimizer(rate, momentum)

  load = collections.Counter()
  towers, accuracies, tower_grads = [], [], []
  for i, device in enumerate(devices):
    with tf.device(place(device, variable_devices(devices), load)), tf.name_scope('tower_%d' % i):
      with tf.variable_scope('', reuse=i > 0):
        tower, accuracy = tower_loss(data, keep_prob)
      tower_grads.append(optimizer.compute_gradients(tower.cross_entropy, tf.trainable_variables()))
      towers.append(tower)
      accuracies.append(accuracy)
  gradients = average_gradients(tower_grads)
  weight_decay = towers[0].weight_decay  # every tower's is the same
  update = optimizer.apply_gradients(add_weight_decay(gradients, weight_decay), global_step)

  with tf.device('/cpu:0'):
    cross_entropy = tf.add_n([tower.cross_entropy for tower in towers]) / len(towers)
    loss = cross_entropy + weight_decay
    # A layer's bias gradient sums all that flows back through it, so these small ones show a NaN in any.
    small = [loss] + [gradient for gradient, variable in gradients if variable.shape.ndims == 1]
    finite = tf.reduce_all([tf.reduce_all(tf.is_finite(value)) for value in small])
    with tf.control_dependencies([update]):
      train_op = tf.assign(images_seen, seen_after).op
    with tf.control_dependencies([train_op]):
      step, seen = global_step.read_value(), images_seen.read_value()
    report = {
      'step': step, 'images_seen': seen, 'epoch': seen / data.num_records, 'loss': loss, 'cross_entropy': cross_entropy,
      'accuracy': tf.add_n(accuracies) / len(towers), 'learning_rate': rate, 'queue_fill': data.queue_fill}  # fmt: skip
  return Model(train_op, report, finite)


# ---------------------------------------------------------------- hooks


class StopHook(tf.train.SessionRunHook):
  """Ends training after the last step, or after the running one where SIGINT or SIGTERM comes."""

  def __init__(self, report, last_step):
    self.signum, self._step, self._last_step = None, report['step'], last_step

  def begin(self):
    self._previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}

  def _on_signal(self, signum, _):
    self.signum = signum
    # Not print, which a signal may have interrupted.
    os.write(2, b'stopping after this step and a save\n')
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def before_run(self, _):
    return tf.train.SessionRunArgs(self._step)

  def after_run(self, run_context, values):
    if self.signum or values.results >= self._last_step:
      run_context.request_stop()


class CheckpointHook(tf.train.SessionRunHook):
  """Saves every `save_steps` steps and at the end; numbers that are not finite end training and are never saved."""

  def __init__(self, model, folder, save_steps, keep_checkpoints):
    self._fetch = [model.report['step'], model.finite]
    self._folder, self._save_steps = folder, save_steps
    self._saver, self._surplus = make_saver(folder, keep_checkpoints)

  def begin(self):
    self._all_finite = tf.reduce_all([tf.reduce_all(tf.is_finite(variable.read_value()))
                                      for variable in tf.global_variables() if variable.dtype.is_floating])  # fmt: skip

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

  def _save(self, session):
    if not session.run(self._all_finite):
      self._fail()
    prefix = os.path.join(self._folder, 'model.ckpt')
    try:
      self._saver.save(session, prefix, self._step, write_meta_graph=False)
    except (tf.errors.OpError, ValueError) as error:
      remove_unfinished_saves(self._folder)
      # Of TensorFlow's page about the graph only what the file system said, which stands before the node's name.
      reason = re.search(r'([^\n]*?)\s*\[\[|$', str(error)).group(1) or error
      raise flags.Error('cannot save step %d in %s: %s' % (self._step, self._folder, reason))
    self._saved = self._step
    while self._surplus:
      tf.train.remove_checkpoint(self._surplus.pop())

  def _fail(self):
    raise flags.Error(
      'step %d: loss, gradients or weights are not finite, and nothing was saved since step %d. '
      'Lower --learning_rate; started again, training resumes at that step' % (self._step, self._saved))  # fmt: skip


class ProgressHook(tf.train.SessionRunHook):
  """Shows progress on stderr, a bar on a terminal and plain lines elsewhere, and writes it for TensorBoard."""

  def __init__(self, report, folder, first_step, last_step, global_batch):
    self._report, self._folder, self._global_batch = report, folder, global_batch
    self._first_step, self._last_step = first_step, last_step

  def after_create_session(self, session, _):
    self._writer = tf.summary.FileWriter(self._folder, session.graph)
    # Points that a killed run wrote beyond this step are not shown twice.
    self._writer.add_session_log(tf.SessionLog(status=tf.SessionLog.START), self._first_step)
    self._bar = tqdm(total=self._last_step, initial=self._first_step, disable=not sys.stderr.isatty(),
                     bar_format='{percentage:3.0f}%|{bar:10}| {desc}')  # fmt: skip
    self._since, self._line_time, self._points = time.time(), 0, []

  def before_run(self, _):
    return tf.train.SessionRunArgs(self._report)

  def after_run(self, _, values):
    self._points.append(values.results)
    step = values.results['step']
    # The first step fills the queue and warms up, so its images/s stands alone.
    if step % SUMMARY_STEPS == 0 or step in (self._first_step + 1, self._last_step):
      self._show(self._points[-1], len(self._points))

  def _show(self, last, steps):
    now = time.time()
    mean = {name: float(np.mean([point[name] for point in self._points])) for name in self._report}
    mean['images_per_second'] = steps * self._global_batch / (now - self._since)
    left = (self._last_step - last['step']) * (now - self._since) / steps
    self._since, self._points = now, []
    values = [tf.Summary.Value(tag=tag, simple_value=mean[tag]) for tag in mean if tag not in ('step', 'images_seen')]
    self._write(lambda: self._writer.add_summary(tf.Summary(value=values), last['step']))
    text = ('step {step}/{last_step}  epoch {epoch:.2f}  loss {loss:.3f} (cross-entropy {cross_entropy:.3f})  accuracy '
            '{accuracy:.1%}  learning rate {learning_rate:.5f}  queue {queue_fill:.0%}  {images_per_second:.0f} images/s  {left} left'
            ).format(**dict(mean, step=last['step'], last_step=self._last_step, epoch=last['epoch'],
                            left=tqdm.format_interval(left)))  # fmt: skip
    self._bar.update(steps)
    self._bar.set_description_str(text)
    if self._bar.disable and (now > self._line_time + LINE_SECONDS or last['step'] == self._last_step):
      self._line_time = now
      print(text, file=sys.stderr)

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


def warn(text):
  print('warning: ' + text, file=sys.stderr)


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


def train(folder, start, model, devices, first_step, last_step, global_batch):
  """Runs steps until `last_step` or a signal; saves in `folder`. Returns the signal's number, or None."""
  os.makedirs(folder, exist_ok=True)
  remove_unfinished_saves(folder)
  network.mark_training(folder, done=False)
  variables = tf.global_variables()
  stop = StopHook(model.report, last_step)
  hooks = [stop, CheckpointHook(model, folder, FLAGS.save_steps, FLAGS.keep_checkpoints),
           ProgressHook(model.report, folder, first_step, last_step, global_batch)]  # fmt: skip
  scaffold = tf.train.Scaffold(init_fn=lambda _, session: start and network.restore(session, variables, start))
  with tf.train.MonitoredTrainingSession(scaffold=scaffold, hooks=hooks, config=network.session_config(len(devices)),
                                         log_step_count_steps=None) as session:  # fmt: skip
    while not session.should_stop():
      session.run(model.train_op)
  if not stop.signum:
    network.mark_training(folder, done=True)
  return stop.signum


def steps_to_do(start, num_records, global_batch):
  """The global step at which this run begins, 0 or that of the checkpoint `start`, and the one at which it ends."""
  first_step, images_seen = 0, 0
  if start:
    counters = [tf.train.get_global_step(), tf.global_variables('images_seen')[0]]
    first_step, images_seen = (int(value) for value in network.read_values(start, counters)[1])
  to_do = max(0, math.ceil((FLAGS.epochs * num_records - images_seen) / global_batch))
  return first_step, min(first_step + to_do, FLAGS.max_steps or first_step + to_do)


def print_header(devices, global_batch, data, folder):
  parameters = sum(variable.shape.num_elements() for variable in tf.trainable_variables())
  print('TensorFlow %s; %d tower(s) on %s; global batch %d; VGG19 with %s parameters\n'
        '%d records in %s; checkpoints and summaries in %s'
        % (tf.__version__, len(devices), ' '.join(devices), global_batch, format(parameters, ','),
           data.num_records, os.path.dirname(data.filenames[0]), folder), file=sys.stderr)  # fmt: skip


def main(_):
  start = network.resume_point(FLAGS.checkpoint_dir)
  folder = os.path.dirname(start) or '.' if start else FLAGS.checkpoint_dir
  devices = tower_devices(FLAGS.num_gpus)
  global_batch = len(devices) * FLAGS.batch_size
  with tf.Graph().as_default():
    tf.set_random_seed(FLAGS.seed)
    data = data_input(FLAGS.data_dir, FLAGS.batch_size, len(CLASSES), True, FLAGS.num_threads)
    model = build(data, devices, FLAGS.epochs, FLAGS.learning_rate, FLAGS.momentum, FLAGS.keep_prob)
    first_step, last_step = steps_to_do(start, data.num_records, global_batch)
    print_header(devices, global_batch, data, folder)
    if first_step >= last_step:
      print(
        'nothing to do: %s has reached step %d; raise --epochs or --max_steps to go on' % (start, first_step), file=sys.stderr
      )
      return
    print('resuming %s, step %d of %d' % (start, first_step, last_step) if start else 'starting, %d steps' % last_step,
          file=sys.stderr)  # fmt: skip
    signum = train(folder, start, model, devices, first_step, last_step, global_batch)
  if signum:
    sys.exit(128 + signum)


if __name__ == '__main__':
  run(main, FLAGS, __doc__)
