import collections
import fcntl
import glob
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import termios
import time

import numpy as np
import pytest
import reference
import tensorflow.compat.v1 as tf
from conftest import (
  PROCESS_SECONDS,
  RECORDS,
  FixedData,
  assert_readable,
  call,
  clean_error,
  command,
  flags_of,
  mistake,
  updates,
  values_of,
)

import data_input
import network
import train


def value_of(folder, name):
  return values_of(folder)[name]


def steps_on_disk(folder):
  return [network.checkpoint_step(prefix) for prefix in network.list_checkpoints(str(folder))]


# ---- gradients and schedule by numbers


def test_average_gradients_is_the_mean_of_each_variable():
  with tf.Graph().as_default(), tf.Session() as session:
    a, b = tf.Variable([0.0, 0.0]), tf.Variable(0.0)
    towers = [[(tf.constant([1.0, 3.0]), a), (tf.constant(1.0), b)], [(tf.constant([5.0, 7.0]), a), (tf.constant(2.0), b)]]
    average = train.average_gradients(towers)
    assert [variable for _, variable in average] == [a, b]
    assert [np.array(value).tolist() for value in session.run([gradient for gradient, _ in average])] == [[3, 5], 1.5]
    ((alone, _),) = train.average_gradients([towers[0][:1]])
    assert session.run(alone).tolist() == [1, 3]


def test_a_gradient_that_is_none_names_its_variable():
  with tf.Graph().as_default():
    lonely = tf.Variable(0.0, name='lonely')
    with pytest.raises(ValueError, match='lonely'):
      train.average_gradients([[(tf.constant(1.0), lonely)], [(None, lonely)]])


def rates(images_seen, epochs):
  with tf.Graph().as_default(), tf.Session() as session:
    return session.run([train.learning_rate(tf.constant(n, tf.int64), 1000, epochs, 0.5) for n in images_seen])


def test_learning_rate_warms_up_then_follows_half_a_cosine_to_zero():
  warmup = train.WARMUP_EPOCHS * 1000
  end = warmup + 12000
  images = [0, warmup / 2, warmup, (warmup + end) / 2, warmup + (end - warmup) / 4, end, 99000]
  expected = [0, 0.25, 0.5, 0.25, 0.5 * (0.5 + 0.5 * np.cos(np.pi / 4)), 0, 0]
  np.testing.assert_allclose(rates([int(n) for n in images], end / 1000), expected, atol=1e-6)
  assert max(rates(range(0, 500, 10), 0.5)) <= 0.5 and rates([500], 0.5)[0] < 1e-6  # half an epoch is a whole schedule too


# ---- updates by numbers made without TensorFlow


@pytest.mark.parametrize('num_towers', [1, 2])
def test_two_updates_follow_the_slopes_of_losses_with_momentum_and_the_rate_of_the_schedule(num_towers):
  with tf.Graph().as_default():
    data = FixedData(RECORDS)
  history = updates(num_towers, 2)
  assert len(history[0].values) == 2 * 38 + 2  # every variable and its momentum, global_step and images_seen
  draw = np.random.RandomState(2)
  for i, (before, after) in enumerate(zip(history, history[1:]), 1):
    assert after.values['global_step'] == i and after.values['global_step'].dtype == np.int64
    assert after.values['images_seen'] == i * RECORDS
    # Warm-up is the first half of an epoch of 1000 images; the peak is 0.1.
    rate = 0.1 * i * RECORDS / 500
    assert after.report['learning_rate'] == pytest.approx(rate)
    values = {name: value.astype(np.float64) for name, value in before.values.items()}
    for name in sorted(values):
      if name + '/Momentum' not in values:
        continue
      old, new = (state.values[name + '/Momentum'].astype(np.float64) for state in (before, after))
      direction = draw.normal(size=old.shape)
      slope = reference.slope(values, name, direction, data.images, data.labels)
      gradient = new - 0.9 * old
      assert (gradient * direction).sum() == pytest.approx(slope, rel=1e-3, abs=1e-6), name
      np.testing.assert_allclose(after.values[name], values[name] - rate * new, rtol=1e-5, atol=1e-7)
    logits = reference.logits(values, data.images)
    cross_entropy = reference.cross_entropy(logits, data.labels)
    # What is reported are means over the towers, of the variables before the update.
    assert after.report['cross_entropy'] == pytest.approx(cross_entropy, rel=1e-4)
    assert after.report['loss'] == pytest.approx(cross_entropy + reference.weight_decay(values), rel=1e-4)
    assert after.report['accuracy'] == pytest.approx(np.mean(logits.argmax(1) == data.labels))
    assert after.report['step'] == i and after.report['images_seen'] == i * RECORDS
    assert after.report['epoch'] == pytest.approx(i * RECORDS / 1000) and after.report['queue_fill'] == 1 / 16


def test_four_towers_make_the_update_of_one_and_add_no_variable():
  (_, one), (_, four) = updates(1, 1), updates(4, 1)
  assert sorted(one.values) == sorted(four.values)
  for name, value in one.values.items():
    assert np.linalg.norm(four.values[name] - value) <= 1e-4 * np.linalg.norm(value), name
  for name, value in one.report.items():
    assert four.report[name] == pytest.approx(value, rel=1e-4), name


def test_towers_train_with_dropout_drawn_anew_by_each_tower_and_step():
  # A rate of 0 changes no variable, so only dropout makes losses differ.
  dropped, whole = (
    [state.report['loss'] for state in updates(2, 3, peak=0, keep_prob=keep_prob)[1:]] for keep_prob in (0.5, 1)
  )
  assert len(set(dropped)) == 3 and len(set(whole)) == 1
  assert np.mean(dropped) != pytest.approx(whole[0], rel=1e-4)


# ---- towers and devices


def test_readers_and_queues_do_not_grow_with_the_towers(small_data):
  counts = []
  for num_towers in (1, 4):
    with tf.Graph().as_default() as graph:
      data = data_input.data_input(str(small_data), 4, 10, True)
      train.build(data, ['/cpu:%d' % i for i in range(num_towers)], 1, 0.1, 0.9, 0.5)
      types = collections.Counter(op.type for op in graph.get_operations())
      counts.append((types['FixedLengthRecordReaderV2'], sum(n for t, n in types.items() if t.endswith('QueueV2'))))
  assert counts == [(1, 3), (1, 3)]  # names of files, shuffled records, batches


@pytest.mark.parametrize(
  'visible, asked, devices',
  [
    (2, None, ['/gpu:0', '/gpu:1']),
    (2, 1, ['/gpu:0']),
    (2, 2, ['/gpu:0', '/gpu:1']),
    (0, None, ['/cpu:0']),
    (0, 2, ['/cpu:0', '/cpu:1']),
  ],
)
def test_towers_go_to_the_gpus_that_are_visible_or_to_the_cpu(monkeypatch, capsys, visible, asked, devices):
  monkeypatch.setattr(tf.config.experimental, 'list_physical_devices', lambda kind: [kind] * visible)
  assert train.tower_devices(asked) == devices
  assert ('no GPU' in capsys.readouterr().err) == (not visible)


def test_more_towers_than_visible_gpus_are_an_error(monkeypatch):
  monkeypatch.setattr(tf.config.experimental, 'list_physical_devices', lambda kind: [kind] * 2)
  with pytest.raises(train.flags.Error, match='--num_gpus 3: only 2 visible'):
    train.tower_devices(3)


def bytes_between_gpus(target):
  """Bytes of the tensors that running the op `target` moves from one GPU to another."""
  operations, todo, sent = set(), [target], {}

  def device(op):
    resources = [tensor.op for tensor in op.inputs if tensor.dtype == tf.resource]
    # TensorFlow places what works on a variable where that is.
    return device(resources[0]) if resources else tf.DeviceSpec.from_string(op.device).to_string()

  while todo:
    op = todo.pop()
    if op in operations:
      continue
    operations.add(op)
    todo += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    for tensor in op.inputs:
      if 'GPU' in device(tensor.op) and 'GPU' in device(op) and device(tensor.op) != device(op):
        sent[tensor.name, device(op)] = tensor
  return sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in sent.values() if tensor.dtype != tf.resource)


def test_on_gpus_variables_are_spread_by_size_and_cross_once_to_each_other_tower(small_data, full_size):
  parameters = 4 * 38947914
  with tf.Graph().as_default() as graph:
    data = data_input.data_input(str(small_data), 4, 10, True)
    model = train.build(data, ['/gpu:%d' % i for i in range(3)], 1, 0.1, 0.9, 0.5)
    bytes_on = collections.Counter()
    for variable in tf.trainable_variables():
      bytes_on[variable.op.device] += 4 * variable.shape.num_elements()
    devices = {variable.op.name: variable.op.device for variable in tf.global_variables()}
    operations = graph.get_operations()
    moved = bytes_between_gpus(model.train_op)
  assert len(bytes_on) == 3 and all('GPU' in device.upper() for device in bytes_on)
  assert max(bytes_on.values()) == 4 * 4096 * 4096  # fc7/weights, alone
  for variable in [name for name in devices if name + '/Momentum' in devices]:
    assert devices[variable + '/Momentum'] == devices[variable]
  # Each value goes to the two other towers, and their gradients come to where the variable lives; the rest are scalars.
  assert 4 * parameters <= moved < 4 * parameters + 1000
  for op in operations:
    if op.name.startswith('input/') or 'Queue' in op.type:
      assert 'CPU:0' in op.device.upper(), op.name
    assert 'nccl' not in op.type.lower()


def test_variables_are_spread_evenly_over_two_devices(full_size):
  sizes = network.variable_sizes(10)
  chosen = network.spread_variables(['x', 'y'], 10)
  assert len(chosen) == 38 and sum(sizes.values()) == 4 * 38947914
  assert abs(sum(size for name, size in sizes.items() if chosen[name] == 'x') / (4 * 38947914) - 0.5) < 0.01
  # The largest first, each where the fewest bytes are: fc7 on one side, then the largest convolutions on the other.
  assert chosen['fc7/weights'] == 'x' and {chosen['conv5_%d/weights' % i] for i in range(1, 5)} == {'y'}


def test_a_tower_leaves_variables_and_pinned_ops_where_they_are():
  with tf.Graph().as_default(), tf.device(network.tower_device('/cpu:3', {'v': '/cpu:1'})):
    assert tf.get_variable('v', [2], use_resource=True).op.device.upper().endswith('CPU:1')
    assert tf.constant(1).op.device.upper().endswith('CPU:3')
    with tf.device('/cpu:2'):
      assert tf.constant(1).op.device.upper().endswith('CPU:2')


# ---- when it ends


def test_training_ends_when_the_images_of_the_epochs_are_seen_or_at_max_steps(small_data, tmp_path):
  def end_of(*arguments):
    call(train, '--data_dir', small_data, '--checkpoint_dir', tmp_path / 'out', *arguments)
    return value_of(tmp_path / 'out', 'global_step'), value_of(tmp_path / 'out', 'images_seen')

  # Of 200 images; the last update may take more.
  assert end_of('--epochs', 0.1, '--batch_size', 8, '--max_steps', 2) == (2, 16)
  assert end_of('--epochs', 0.1, '--batch_size', 8) == (3, 24)
  assert end_of('--epochs', 0.2, '--batch_size', 4) == (7, 40)


# ---- the command


def test_four_towers_without_a_gpu_warn_and_train(two_steps):
  folder, stderr = two_steps
  assert_readable(stderr)
  for words in ('warning: TensorFlow sees no GPU: 4 towers', 'TensorFlow ' + tf.__version__,
                '4 tower(s) on /cpu:0 /cpu:1 /cpu:2 /cpu:3', 'global batch 8;', '200 records in ', 'starting, 2 steps',
                'step 2/2  epoch 0.08 ', 'learning rate', 'images/s', 'left', 'saved step 2 in ' + folder):  # fmt: skip
    assert words in stderr, words
  values = values_of(folder)
  assert values['global_step'] == 2 and values['images_seen'] == 16
  names = [layer + kind for layer in reference.LAYERS for kind in ('/weights', '/biases')]
  assert sorted(values) == sorted(names + [name + '/Momentum' for name in names] + ['global_step', 'images_seen'])
  assert os.path.exists(os.path.join(folder, network.TRAINING_DONE))


def scalars(folder):
  """{tag: {step: value}} of the event files in a folder."""
  points = collections.defaultdict(dict)
  for path in sorted(glob.glob(os.path.join(str(folder), 'events.*'))):
    for event in tf.train.summary_iterator(path):
      for value in event.summary.value:
        points[value.tag][event.step] = value.simple_value
  return points


def test_summaries_hold_what_the_line_shows(two_steps):
  points = scalars(two_steps[0])
  for tag in ('loss', 'cross_entropy', 'accuracy', 'learning_rate', 'images_per_second', 'queue_fill', 'epoch'):
    assert sorted(points[tag]) == [1, 2], tag
  # A warm-up of 5 epochs of 200 images to the default peak of 0.03.
  assert points['learning_rate'][2] == pytest.approx(0.03 * 16 / 1000, rel=1e-4)
  assert points['epoch'][2] == pytest.approx(16 / 200)
  assert points['loss'][2] > points['cross_entropy'][2] > 1
  shown = re.search(r'^step 2/2 .* loss (\S+) \(cross-entropy (\S+)\)  accuracy (\S+)%', two_steps[1], re.M).groups()
  expected = points['loss'][2], points['cross_entropy'][2], 100 * points['accuracy'][2]
  assert [float(number) for number in shown] == pytest.approx(expected, abs=0.06)


def test_the_line_and_the_point_are_means_over_the_steps_since_the_last(small_data, tmp_path, monkeypatch, capsys):
  every, folders = [], []
  for name, steps in (('single', 1), ('mean', 3)):
    monkeypatch.setattr(train, 'SUMMARY_STEPS', steps)
    folders.append(tmp_path / name)
    call(train, '--data_dir', small_data, '--checkpoint_dir', folders[-1], '--batch_size', 2, '--max_steps', 6)
    every.append(scalars(folders[-1]))
  assert sorted(every[0]['epoch']) == [1, 2, 3, 4, 5, 6] and sorted(every[1]['epoch']) == [1, 3, 6]
  for points in every:
    assert points['learning_rate'][1] == pytest.approx(0.03 * 2 / 1000)
  assert every[1]['learning_rate'][3] == pytest.approx(0.03 * (4 + 6) / 2 / 1000)
  assert every[1]['epoch'][6] == pytest.approx((8 + 10 + 12) / 3 / 200)
  assert 'step 6/6  epoch 0.06 ' in capsys.readouterr().err  # the line says where training is


def test_training_goes_on_where_it_was_with_another_number_of_towers(resumable, small_data, capsys):
  with open(os.path.join(resumable, 'notes.txt'), 'w') as f:
    f.write('mine')
  prefix = network.find_checkpoint(resumable)
  values = dict(values_of(resumable), **{'fc8/biases/Momentum': np.full([10], 1000, np.float32)})
  with tf.Graph().as_default(), tf.Session() as session:
    for name, value in values.items():
      tf.Variable(value, name=name)
    session.run(tf.global_variables_initializer())
    tf.train.Saver().save(session, prefix, write_meta_graph=False)
  call(train, '--data_dir', small_data, '--checkpoint_dir', resumable, '--batch_size', 4, '--max_steps', 4)
  stderr = capsys.readouterr().err
  assert 'resuming %s, step 2 of 4' % prefix in stderr and 'step 3/4' in stderr
  assert value_of(resumable, 'global_step') == 4 and value_of(resumable, 'images_seen') == 16 + 8
  assert steps_on_disk(resumable) == [2, 4]
  starts = [event.step for path in glob.glob(os.path.join(resumable, 'events.*')) for event in tf.train.summary_iterator(path)
            if event.session_log.status == tf.SessionLog.START]  # fmt: skip
  assert sorted(starts) == [0, 2]  # TensorBoard drops what a killed run wrote beyond
  assert scalars(resumable)['learning_rate'][4] == pytest.approx(0.03 * 24 / 1000, rel=1e-4)
  # Each of the two updates adds a gradient below 1 to 0.9 of the accumulator; were it lost, it would start at zero.
  np.testing.assert_allclose(value_of(resumable, 'fc8/biases/Momentum'), 810, atol=2)
  with open(os.path.join(resumable, 'notes.txt')) as f:
    assert f.read() == 'mine'


def test_flags_of_the_update_reach_it(resumable, small_data):
  before = values_of(resumable)
  call(train, '--data_dir', small_data, '--checkpoint_dir', resumable, '--batch_size', 4, '--max_steps', 3,
       '--learning_rate', 0.01, '--momentum', 0.5, '--epochs', 2, '--keep_prob', 0.001)  # fmt: skip
  after = values_of(resumable)
  rate = 0.01 * (16 + 4) / 200  # a schedule of 2 epochs warms up for 1
  for name in ('conv1_1/weights', 'fc8/biases'):
    np.testing.assert_allclose(before[name] - after[name], rate * after[name + '/Momentum'], rtol=1e-3, atol=1e-6)
  # Dropout leaves nothing of fc6 and fc7, so that fc7's kernel gets its decay alone, beside half of the old accumulator.
  expected = 0.5 * before['fc7/weights/Momentum'] + 0.0004 * before['fc7/weights']
  np.testing.assert_allclose(after['fc7/weights/Momentum'], expected, atol=1e-7)
  assert abs(before['fc7/weights/Momentum']).max() > 1e-4


def test_a_seed_makes_the_same_weights(small_data, tmp_path):
  starts = []
  for i, seed in enumerate((1, 1, 2)):
    folder = tmp_path / str(i)
    call(train, '--data_dir', small_data, '--checkpoint_dir', folder, '--batch_size', 2, '--max_steps', 1, '--seed', seed,
         '--learning_rate', 1e-12)  # fmt: skip
    starts.append(value_of(folder, 'fc7/weights'))
  np.testing.assert_allclose(starts[0], starts[1], atol=1e-6)
  assert abs(starts[0] - starts[2]).max() > 0.01


def test_steps_that_are_done_already_are_not_done_again(resumable, small_data, capsys):
  before = {name: os.stat(os.path.join(resumable, name)).st_mtime_ns for name in os.listdir(resumable)}
  call(train, '--data_dir', small_data, '--checkpoint_dir', resumable, '--max_steps', 2)
  stderr = capsys.readouterr().err
  assert 'nothing to do: %s is of step 2;' % os.path.join(resumable, 'model.ckpt-2') in stderr
  assert {name: os.stat(os.path.join(resumable, name)).st_mtime_ns for name in os.listdir(resumable)} == before


def test_a_moved_folder_resumes_and_keeps_only_so_many_checkpoints(resumable, small_data, tmp_path, monkeypatch):
  moved = str(tmp_path / 'elsewhere')
  shutil.move(resumable, moved)
  monkeypatch.chdir(tmp_path)
  # Those of earlier runs are among those that are kept, and their surplus goes where fewer are to be kept.
  for last, keep, left in ((5, 3, [3, 4, 5]), (6, 2, [5, 6])):
    call(train, '--data_dir', small_data, '--checkpoint_dir', 'elsewhere', '--batch_size', 2, '--max_steps', last,
         '--save_steps', 1, '--keep_checkpoints', keep)  # fmt: skip
    assert steps_on_disk(moved) == left


def test_a_prefix_resumes_that_checkpoint_and_saves_beside_it(resumable, small_data):
  call(train, '--data_dir', small_data, '--checkpoint_dir', os.path.join(resumable, 'model.ckpt-2'), '--batch_size', 2,
       '--max_steps', 3)  # fmt: skip
  assert steps_on_disk(resumable) == [2, 3]


def test_saves_come_every_save_steps_and_at_the_end(small_data, tmp_path):
  call(train, '--data_dir', small_data, '--checkpoint_dir', tmp_path / 'out', '--batch_size', 2, '--max_steps', 8,
       '--save_steps', 3)  # fmt: skip
  assert steps_on_disk(tmp_path / 'out') == [3, 6, 8]


def test_on_a_narrow_terminal_every_line_is_whole(resumable, small_data):
  ours, theirs = os.openpty()
  fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 80, 0, 0))
  arguments = command('train.py', '--data_dir', small_data, '--checkpoint_dir', resumable, '--batch_size', 2, '--max_steps', 3)
  with subprocess.Popen(arguments, stderr=theirs) as process:
    os.close(theirs)
    text = b''
    while True:
      try:
        text += os.read(ours, 1000)
      except OSError:  # closed
        break
  os.close(ours)
  assert process.returncode == 0
  lines = re.split('[\r\n]+', text.decode())
  (line,) = [line for line in lines if 'step 3/3  epoch' in line]
  assert line.rstrip().endswith('left') and 'images/s' in line and 'queue' in line
  assert 'saved step 3 in ' + resumable in lines
  bars = [line for line in lines if '%|' in line]
  assert bars and all(len(bar.rstrip()) <= 80 for bar in bars) and any('step 3/3  00:00 left' in bar for bar in bars)


def wait_for_line(process, word):
  for line in process.stderr:
    if word in line:
      return
  raise AssertionError('no line with ' + word)


@pytest.mark.parametrize(
  'number, status, word, full', [(signal.SIGINT, 130, 'step 1/', False), (signal.SIGTERM, 143, 'starting', True)]
)
def test_a_signal_saves_and_ends_the_run_in_order(small_data, tmp_path, number, status, word, full):
  arguments = command('train.py', '--data_dir', small_data, '--checkpoint_dir', tmp_path / 'out', '--batch_size', 2, full=full)
  with subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, encoding='utf-8') as process:
    wait_for_line(process, word)
    if word == 'starting':
      time.sleep(1)  # the session is being made, or the queue fills
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PROCESS_SECONDS)
  assert process.returncode == status, stderr
  assert not stdout
  assert_readable(stderr)
  (step,) = steps_on_disk(tmp_path / 'out')
  assert step >= 1 and value_of(tmp_path / 'out', 'global_step') == step
  assert not os.path.exists(str(tmp_path / 'out' / network.TRAINING_DONE))


def test_numbers_that_are_not_finite_end_the_run_and_are_not_saved(resumable, small_data):
  text = mistake(train, '--data_dir', small_data, '--checkpoint_dir', resumable, '--batch_size', 4, '--max_steps', 60,
                 '--learning_rate', '1e9', '--save_steps', 1)  # fmt: skip
  assert 'not finite' in text and '--learning_rate' in text
  step, saved = map(int, re.search(r'step (\d+): .* since step (\d+)', text).groups())
  assert 2 <= saved < step and steps_on_disk(resumable)[-1] == saved
  for prefix in network.list_checkpoints(resumable):
    assert all(np.isfinite(value).all() for value in values_of(prefix).values()), prefix


def test_training_ends_at_the_step_that_is_not_finite_not_at_the_next_save(resumable, small_data):
  text = mistake(train, '--data_dir', small_data, '--checkpoint_dir', resumable, '--batch_size', 4, '--max_steps', 300,
                 '--learning_rate', '1e9')  # fmt: skip
  assert int(re.match(r'step (\d+): ', text).group(1)) < 100 and 'since step 2' in text


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
  """The last update may overflow where the loss, of before it, was finite."""
  with tf.Graph().as_default():
    tf.train.get_or_create_global_step()
    weights = tf.get_variable('weights', initializer=[1.0, 2.0], use_resource=True)
    update = tf.group(weights.assign([1.0, np.inf]), tf.train.get_global_step().assign_add(1))
    with tf.control_dependencies([update]):
      report = {'step': tf.train.get_global_step().read_value(), 'loss': tf.constant(1.0)}
    hook = train.CheckpointHook(report, network.CheckpointWriter(str(tmp_path), 5), 1, 1)
    finite_only = pytest.raises(train.flags.Error, match='step 1: .* not finite')
    with finite_only, tf.train.MonitoredSession(hooks=[hook]) as session:
      session.run(update)
  assert os.listdir(str(tmp_path)) == []


def test_a_save_that_fails_names_the_reason_and_leaves_the_older_checkpoint(resumable, small_data):
  def limit():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000,) * 2)  # too little for the summaries, too

  line = clean_error('train.py', '--data_dir', small_data, '--checkpoint_dir', resumable, '--batch_size', 4, '--max_steps', 3,
                     preexec_fn=limit)  # fmt: skip
  assert 'cannot save step 3' in line and 'File too large' in line and len(line) < 400
  assert network.find_checkpoint(resumable).endswith('model.ckpt-2') and steps_on_disk(resumable) == [2]
  assert not glob.glob(os.path.join(resumable, '*temp*'))


def test_what_stands_in_the_way_of_a_save_is_named_and_what_killed_saves_left_is_removed(resumable, small_data):
  os.makedirs(os.path.join(resumable, 'model.ckpt-3.index', 'in the way'))
  os.makedirs(os.path.join(resumable, 'model.ckpt-1_temp_0123456789abcdef'))
  text = mistake(train, '--data_dir', small_data, '--checkpoint_dir', resumable, '--batch_size', 4, '--max_steps', 3)
  assert 'cannot save step 3' in text and 'directory' in text and len(text) < 400
  assert steps_on_disk(resumable) == [2] and not glob.glob(os.path.join(resumable, '*temp*'))


def test_a_full_disk_is_named_and_the_older_checkpoint_stays(resumable, small_data, tmp_path):
  disk = tmp_path / 'small disk'
  disk.mkdir()
  mount = ['mount', '-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', str(disk)]
  if os.getuid() or subprocess.call(mount, stderr=subprocess.DEVNULL):
    pytest.skip('needs the right to mount a small tmpfs')
  try:
    folder = shutil.copytree(resumable, str(disk / 'checkpoints'))
    with open(str(disk / 'filler'), 'wb', 0) as filler:
      free = os.statvfs(str(disk)).f_bavail * os.statvfs(str(disk)).f_frsize
      filler.write(bytes(free - 32768))
    text = mistake(train, '--data_dir', small_data, '--checkpoint_dir', folder, '--batch_size', 4, '--max_steps', 3)
    assert 'cannot save step 3' in text and 'No space left' in text
    assert network.find_checkpoint(folder).endswith('model.ckpt-2') and steps_on_disk(folder) == [2]
  finally:
    subprocess.check_call(['umount', '-l', str(disk)])  # the summary writer has a file open


@pytest.mark.parametrize(
  'flag, value',
  [
    ('num_gpus', 0),
    ('num_gpus', -1),
    ('num_gpus', 'two'),
    ('num_gpu', 4),
    ('batch_size', 0),
    ('keep_prob', 1.5),
    ('keep_prob', 0),
    ('momentum', 1.1),
    ('learning_rate', -1),
    ('learning_rate', 'nan'),
    ('epochs', 0),
    ('epochs', 'inf'),
    ('max_steps', 0),
    ('save_steps', 0),
    ('keep_checkpoints', 0),
  ],
)
def test_wrong_flags_are_named(flag, value):
  assert flag in mistake(train, '--%s' % flag, value)


def test_each_script_has_flags_of_its_own():
  import test_tfrecords
  import toTFRecords
  import val

  with flags_of(train, '--batch_size', 7, '--data_dir', 'elsewhere'):
    assert train.FLAGS.batch_size == 7
    assert val.FLAGS['batch_size'].value == test_tfrecords.FLAGS['batch_size'].value == 128
    assert val.FLAGS['data_dir'].value == data_input.FLAGS['data_dir'].value == 'data'
  for script in (data_input, train, val, toTFRecords, test_tfrecords):
    assert "'no_such_flag'" in mistake(script, '--no_such_flag', 4)
