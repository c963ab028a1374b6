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
import tensorflow.compat.v1 as tf
from conftest import (
  TIMEOUT,
  after_one_step,
  assert_readable,
  assert_same_update,
  clean_error,
  command,
  mistake,
  run_script,
  write_small_data,
)

import data_input
import network
import train


def value_of(folder, name):
  return tf.train.NewCheckpointReader(network.find_checkpoint(str(folder))).get_tensor(name)


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


# ---- towers


def test_four_towers_of_32_make_the_update_of_one_tower_of_128(one_tower):
  four_towers = after_one_step(4)
  assert_same_update(one_tower.values, four_towers.values)
  for name in one_tower.report:
    assert four_towers.report[name] == pytest.approx(one_tower.report[name], rel=1e-4), name


@pytest.mark.parametrize('keep_prob', [0.5, 1])
def test_towers_train_with_dropout(small_data, keep_prob):
  with tf.Graph().as_default() as graph:
    data = data_input.data_input(str(small_data), 4, 10, True)
    train.build(data, ['/cpu:0', '/cpu:1'], 1, 0.1, 0.9, keep_prob)
    draws = [op.name for op in graph.get_operations() if op.type == 'RandomUniform' and 'dropout' in op.name]
  assert len(draws) == (4 if keep_prob == 0.5 else 0)  # fc6 and fc7 of two towers


def test_readers_and_queues_do_not_grow_with_the_towers(small_data):
  counts = []
  for num_towers in (1, 4):
    with tf.Graph().as_default() as graph:
      data = data_input.data_input(str(small_data), 4, 10, True)
      train.build(data, ['/cpu:%d' % i for i in range(num_towers)], 1, 0.1, 0.9, 0.5)
      types = collections.Counter(op.type for op in graph.get_operations())
      counts.append((types['FixedLengthRecordReaderV2'], sum(n for t, n in types.items() if t.endswith('QueueV2'))))
  assert counts == [(1, 3), (1, 3)]  # names of files, shuffled records, batches


def canonical(device):
  return tf.DeviceSpec.from_string(device).to_string()


def test_on_gpus_variables_are_spread_by_size_and_updated_where_they_live(small_data):
  gpus = ['/gpu:%d' % i for i in range(3)]
  with tf.Graph().as_default() as graph:
    data = data_input.data_input(str(small_data), 4, 10, True)
    train.build(data, gpus, 1, 0.1, 0.9, 0.5)
    bytes_on = collections.Counter()
    for variable in tf.trainable_variables():
      bytes_on[variable.op.device] += 4 * variable.shape.num_elements()
    updates = [op for op in graph.get_operations() if op.type == 'ResourceApplyMomentum']
    operations = graph.get_operations()
  assert len(bytes_on) == 3 and all('GPU' in device.upper() for device in bytes_on)
  assert max(bytes_on.values()) == 4 * 4096 * 4096  # fc7/weights, alone
  assert len(updates) == 38
  for update in updates:
    variable, momentum = update.inputs[0].op, update.inputs[1].op
    assert canonical(update.device) == canonical(variable.device) == canonical(momentum.device)
    gradient = update.inputs[3].op  # the mean, with weight decay where there is one
    assert canonical(gradient.device) == canonical(variable.device), gradient.name
  for op in operations:
    if op.name.startswith('input/') or 'Queue' in op.type:
      assert 'CPU:0' in op.device.upper(), op.name
    assert 'nccl' not in op.type.lower()


def test_variables_are_spread_largest_first_where_least_is():
  sizes = {'a': 5, 'b': 3, 'c': 1, 'd': 2, 'e': 9}
  assert train.spread(sizes, ['/gpu:0', '/gpu:1']) == {
    'e': '/gpu:0',
    'a': '/gpu:1',
    'b': '/gpu:1',
    'd': '/gpu:1',
    'c': '/gpu:0',
  }
  where = train.spread(train.sizes_of_variables(10), ['x', 'y'])
  assert len(where) == 38
  bytes_on_x = sum(size for name, size in train.sizes_of_variables(10).items() if where[name] == 'x')
  assert abs(bytes_on_x / (4 * 38947914) - 0.5) < 0.01


def test_place_follows_the_plan_for_variables_and_pinned_devices_for_the_rest():
  with tf.Graph().as_default(), tf.device(train.place('/cpu:3', {'v': '/cpu:1'})):
    assert tf.get_variable('v', [2], use_resource=True).op.device.upper().endswith('CPU:1')
    assert tf.constant(1).op.device.upper().endswith('CPU:3')
    with tf.device('/cpu:2'):
      assert tf.constant(1).op.device.upper().endswith('CPU:2')


# ---- when it ends


def test_training_ends_when_the_images_of_the_epochs_are_seen_or_at_max_steps():
  def steps_made(images_a_step, *arguments):
    """Steps until StopHook ends a session whose steps take so many images, where the global batch was to be 8."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    train.FLAGS(['train.py', '--epochs', '0.5'] + list(arguments))
    try:
      with tf.Graph().as_default():
        step, seen = tf.Variable(0, dtype=tf.int64), tf.Variable(0, dtype=tf.int64)
        update = tf.group(step.assign_add(1), seen.assign_add(images_a_step))
        with tf.control_dependencies([update]):
          report = {'step': step.read_value(), 'images_seen': seen.read_value()}
        hook = train.StopHook(report, train.steps_to_do(None, 80, 8))
        made = 0
        with tf.train.MonitoredSession(hooks=[hook]) as session:
          while not session.should_stop():
            session.run(update)
            made += 1
    finally:
      for name in train.FLAGS:
        train.FLAGS[name].unparse()
      for number, handler in handlers.items():
        signal.signal(number, handler)
    return made

  assert steps_made(8) == 5
  assert steps_made(4) == 10  # half of the workers are out
  assert steps_made(8, '--max_steps', '3') == 3


# ---- the command


def test_four_towers_without_a_gpu_warn_and_train(two_steps, tmp_path):
  write_small_data(tmp_path)
  done = run_script('train.py', '--data_dir', tmp_path, '--checkpoint_dir', tmp_path / 'out', '--num_gpus', 4,
                    '--batch_size', 2, '--max_steps', 3)  # fmt: skip
  assert_readable(done.stderr)
  assert not done.stdout
  for words in ('warning: TensorFlow sees no GPU: 4 towers', 'TensorFlow ' + tf.__version__, '4 tower(s) on /cpu:0 /cpu:1 /cpu:2 /cpu:3', 'global batch 8',
                '38,947,914 parameters', '200 records in ' + str(tmp_path), 'step 3/3  epoch 0.12', 'learning rate',
                'images/s', 'left'):  # fmt: skip
    assert words in done.stderr, words
  assert value_of(tmp_path / 'out', 'global_step') == 3 and value_of(tmp_path / 'out', 'images_seen') == 24
  shapes = tf.train.NewCheckpointReader(network.find_checkpoint(str(tmp_path / 'out'))).get_variable_to_shape_map()
  assert len([name for name in shapes if name.endswith(('/weights', '/biases'))]) == 38
  assert not [name for name in shapes if 'tower' in name]
  assert shapes == tf.train.NewCheckpointReader(network.find_checkpoint(two_steps)).get_variable_to_shape_map()


def scalars(folder):
  """{tag: {step: value}} of the event files in a folder."""
  points = collections.defaultdict(dict)
  for path in sorted(glob.glob(os.path.join(str(folder), 'events.*'))):
    for event in tf.train.summary_iterator(path):
      for value in event.summary.value:
        points[value.tag][event.step] = value.simple_value
  return points


def test_summaries_hold_what_the_line_shows(two_steps):
  points = scalars(two_steps)
  for tag in ('loss', 'cross_entropy', 'accuracy', 'learning_rate', 'images_per_second', 'queue_fill', 'epoch'):
    assert sorted(points[tag]) == [1, 2], tag
  assert points['learning_rate'][2] == pytest.approx(0.03 * 16 / (200 * train.WARMUP_EPOCHS), rel=1e-4)
  assert points['epoch'][2] == pytest.approx(16 / 200)
  assert points['loss'][2] > points['cross_entropy'][2] > 2


def test_training_goes_on_where_it_was_with_another_number_of_towers(resumable, small_data):
  with open(os.path.join(resumable, 'notes.txt'), 'w') as f:
    f.write('mine')
  prefix = network.find_checkpoint(resumable)
  reader = tf.train.NewCheckpointReader(prefix)
  with tf.Graph().as_default(), tf.Session() as session:
    for name in reader.get_variable_to_shape_map():
      tf.Variable(np.full([10], 1000, np.float32) if name == 'fc8/biases/Momentum' else reader.get_tensor(name), name=name)
    session.run(tf.global_variables_initializer())
    tf.train.Saver().save(session, prefix, write_meta_graph=False)
  done = run_script('train.py', '--data_dir', small_data, '--checkpoint_dir', resumable, '--batch_size', 4, '--max_steps', 4)
  assert 'step 2 of 4' in done.stderr and 'step 3/4' in done.stderr
  assert value_of(resumable, 'global_step') == 4 and value_of(resumable, 'images_seen') == 16 + 8
  assert steps_on_disk(resumable) == [2, 4]
  assert scalars(resumable)['learning_rate'][4] == pytest.approx(0.03 * 24 / (200 * train.WARMUP_EPOCHS), rel=1e-4)
  # Each of the two updates adds a gradient below 1 to 0.9 of the accumulator; were it lost, it would start at zero.
  np.testing.assert_allclose(value_of(resumable, 'fc8/biases/Momentum'), 810, atol=2)
  with open(os.path.join(resumable, 'notes.txt')) as f:
    assert f.read() == 'mine'


def test_steps_that_are_done_already_are_not_done_again(resumable, small_data):
  before = {name: os.stat(os.path.join(resumable, name)).st_mtime_ns for name in os.listdir(resumable)}
  done = run_script('train.py', '--data_dir', small_data, '--checkpoint_dir', resumable, '--max_steps', 2)
  assert 'nothing to do' in done.stderr and 'step 2' in done.stderr
  assert {name: os.stat(os.path.join(resumable, name)).st_mtime_ns for name in os.listdir(resumable)} == before


def test_a_moved_folder_resumes_and_keeps_only_so_many_checkpoints(resumable, small_data, tmp_path):
  moved = str(tmp_path / 'elsewhere')
  shutil.move(resumable, moved)
  # Those of earlier runs are among those that are kept, and their surplus goes where fewer are to be kept.
  for last, keep, left in ((5, 3, [3, 4, 5]), (6, 2, [5, 6])):
    run_script('train.py', '--data_dir', small_data, '--checkpoint_dir', 'elsewhere', '--batch_size', 2, '--max_steps', last,
               '--save_steps', 1, '--keep_checkpoints', keep, cwd=str(tmp_path))  # fmt: skip
    assert steps_on_disk(moved) == left


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


def start_training(data, folder, *arguments):
  process = subprocess.Popen(
    command('train.py', '--data_dir', data, '--checkpoint_dir', folder, '--batch_size', 2, *arguments),
    stderr=subprocess.PIPE, stdout=subprocess.PIPE, encoding='utf-8')  # fmt: skip
  return process


def wait_for_line(process, word):
  for line in process.stderr:
    if word in line:
      return
  raise AssertionError('no line with ' + word)


@pytest.mark.parametrize('number, status, word', [(signal.SIGINT, 130, 'step 1/'), (signal.SIGTERM, 143, 'starting')])
def test_a_signal_saves_and_ends_the_run_in_order(small_data, tmp_path, number, status, word):
  with start_training(small_data, tmp_path / 'out') as process:
    wait_for_line(process, word)
    if word == 'starting':
      time.sleep(1)  # the session is being made, or the queue fills
    start = time.time()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=TIMEOUT)
  assert process.returncode == status, stderr
  assert time.time() - start < 20 and not stdout
  assert_readable(stderr)
  (step,) = steps_on_disk(tmp_path / 'out')
  assert step >= 1 and value_of(tmp_path / 'out', 'global_step') == step
  assert not os.path.exists(str(tmp_path / 'out' / network.TRAINING_DONE))


def test_numbers_that_are_not_finite_end_the_run_and_are_not_saved(resumable, small_data):
  line = clean_error('train.py', '--data_dir', small_data, '--checkpoint_dir', resumable, '--batch_size', 4, '--max_steps', 30,
                     '--learning_rate', '1e6', '--save_steps', 1)  # fmt: skip
  assert 'not finite' in line and 'step ' in line and '--learning_rate' in line
  for prefix in network.list_checkpoints(resumable):
    reader = tf.train.NewCheckpointReader(prefix)
    assert all(np.isfinite(reader.get_tensor(name)).all() for name in reader.get_variable_to_shape_map()), prefix


@pytest.mark.parametrize('megabytes', [50, 0.01])  # of which the second is too little for the summaries, too
def test_a_save_that_fails_names_the_reason_and_leaves_the_older_checkpoint(resumable, small_data, megabytes):
  def limit():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(megabytes * 2**20),) * 2)

  line = clean_error('train.py', '--data_dir', small_data, '--checkpoint_dir', resumable, '--batch_size', 4, '--max_steps', 3,
                     preexec_fn=limit)  # fmt: skip
  assert 'cannot save step 3' in line and 'File too large' in line and len(line) < 400
  assert network.find_checkpoint(resumable).endswith('model.ckpt-2') and steps_on_disk(resumable) == [2]
  assert not glob.glob(os.path.join(resumable, '*temp*'))


def test_a_full_disk_is_named_and_the_older_checkpoint_stays(resumable, small_data, tmp_path):
  disk = tmp_path / 'small disk'
  disk.mkdir()
  mount = ['mount', '-t', 'tmpfs', '-o', 'size=400m', 'tmpfs', str(disk)]
  if os.getuid() or subprocess.call(mount, stderr=subprocess.DEVNULL):
    pytest.skip('needs the right to mount a small tmpfs')
  try:
    folder = shutil.copytree(resumable, str(disk / 'checkpoints'))
    line = clean_error('train.py', '--data_dir', small_data, '--checkpoint_dir', folder, '--batch_size', 4, '--max_steps', 3)
    assert 'cannot save step 3' in line and 'No space left' in line
    assert network.find_checkpoint(folder).endswith('model.ckpt-2') and steps_on_disk(folder) == [2]
  finally:
    subprocess.check_call(['umount', str(disk)])


@pytest.mark.parametrize(
  'flag, value',
  [
    ('num_gpus', 0),
    ('num_gpus', -1),
    ('num_gpus', 'two'),
    ('num_gpu', 4),
    ('batch_size', 0),
    ('keep_prob', 1.5),
    ('epochs', 0),
  ],
)
def test_wrong_flags_are_named(flag, value):
  assert flag in mistake(train, '--%s' % flag, value)


def test_all_scripts_can_be_imported_together_each_with_its_own_flags():
  import test_tfrecords
  import toTFRecords
  import val

  scripts = (data_input, train, val, toTFRecords, test_tfrecords)
  assert len({id(script.FLAGS) for script in scripts}) == 5
  for script in scripts:
    assert "'no_such_flag'" in mistake(script, '--no_such_flag', 4)
