"""Several processes on this machine as a cluster: train.py under TF_CONFIG."""

import json
import os
import re
import signal
import socket
import subprocess
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from conftest import (
  PROCESS_SECONDS,
  RECORDS,
  ROOT,
  assert_readable,
  clean_error,
  command,
  environment,
  updates,
  values_of,
  write_small_data,
)

import network
import train
import val


processes = pytest.mark.long  # tests that start clusters of them


class Cluster(object):
  """Starts, kills and ends processes on free ports; their messages go to files in `folder`."""

  def __init__(self, folder, script='train.py', **sizes):
    self.folder, self.script, self.processes = str(folder), script, {}
    sockets = {job: [socket.socket() for _ in range(size)] for job, size in sizes.items()}
    for listener in sum(sockets.values(), []):
      listener.bind(('127.0.0.1', 0))
    self.jobs = {job: ['127.0.0.1:%d' % one.getsockname()[1] for one in some] for job, some in sockets.items()}
    for listener in sum(sockets.values(), []):
      listener.close()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process in self.processes.values():
      process.kill()
      process.wait()

  def start(self, job, index, *arguments):
    config = json.dumps({'cluster': self.jobs, 'task': {'type': job, 'index': index}})
    with open(self.log(job, index), 'ab') as log:
      self.processes[job, index] = subprocess.Popen(
        command(self.script, *arguments),
        env=environment(TF_CONFIG=config, TF_CPP_MIN_LOG_LEVEL='3'),
        stderr=log,
        stdout=log,
      )

  def start_all(self, *arguments):
    for job in self.jobs:
      for index in range(len(self.jobs[job])):
        self.start(job, index, *arguments)

  def log(self, job, index):
    return os.path.join(self.folder, '%s%d.log' % (job, index))

  def text(self, job, index):
    with open(self.log(job, index)) as f:
      return f.read()

  def wait_for(self, condition):
    """Waits until `condition()` is true; returns it."""
    end = time.time() + PROCESS_SECONDS
    while not condition():
      assert time.time() < end, '\n'.join('%s %d:\n%s' % (task + (self.text(*task),)) for task in self.processes)
      time.sleep(0.1)
    return condition()

  def signal(self, job, index, number=signal.SIGKILL):
    self.processes[job, index].send_signal(number)
    status = self.processes[job, index].wait(PROCESS_SECONDS)
    return status

  def ends(self):
    """Exit statuses once all have ended by themselves."""
    self.wait_for(lambda: all(process.poll() is not None for process in self.processes.values()))
    return [process.returncode for process in self.processes.values()]


def newest_step(folder):
  steps = [network.checkpoint_step(prefix) for prefix in network.list_checkpoints(str(folder))]
  return max(steps + [-1])


def value_at(folder, step, name):
  return tf.train.NewCheckpointReader(os.path.join(str(folder), 'model.ckpt-%d' % step)).get_tensor(name)


# ---- all goes well


# train.py on fixed records: the first half for the first worker, the second for the second.
FIXED_INPUT = """
import json, os, sys
sys.path[:0] = [{root!r}, {tests!r}]
import conftest, data_input, train

class Fixed(conftest.FixedData):
  filenames = ['here/fixed']

  def __init__(self, _, batch_size, *__):
    super().__init__(batch_size)
    self._next = batch_size * json.loads(os.environ['TF_CONFIG'])['task']['index']

train.data_input = Fixed
data_input.run(train.main, train.FLAGS, '')
"""


@processes
def test_two_workers_make_the_first_update_of_one_process_with_twice_the_batch(tmp_path):
  out, script = tmp_path / 'out', tmp_path / 'fixed.py'
  out.mkdir()
  start, one = updates(1, 1)
  with tf.Graph().as_default(), tf.Session() as session:
    for name, value in start.values.items():
      tf.Variable(value, name=name)
    session.run(tf.global_variables_initializer())
    tf.train.Saver().save(session, str(out / 'model.ckpt'), 0, write_meta_graph=False)
  script.write_text(FIXED_INPUT.format(root=ROOT, tests=os.path.join(ROOT, 'tests')))
  with Cluster(tmp_path, str(script), ps=1, worker=2) as cluster:
    cluster.start_all('--batch_size', RECORDS // 2, '--checkpoint_dir', out, '--keep_prob', 1, '--learning_rate', 0.1, '--epochs', 1,
                      '--max_steps', 2, '--save_steps', 1)  # fmt: skip
    assert set(cluster.ends()) == {0}
    for words in ('global batch 16', 'resuming', 'step 2/2'):
      assert words in cluster.text('worker', 0)
    assert 'images/s here' in cluster.text('worker', 1) and 'images/s here' not in cluster.text('worker', 0)
    for task in cluster.processes:
      assert_readable(cluster.text(*task))
  two = values_of(out / 'model.ckpt-1')
  assert sorted(two) == sorted(one.values)
  for name, value in one.values.items():
    assert np.linalg.norm(two[name] - value) <= 1e-4 * np.linalg.norm(value), name
  assert newest_step(out) == 2 and value_at(out, 2, 'global_step') == 2 and value_at(out, 2, 'images_seen') == 2 * RECORDS
  assert len([name for name in os.listdir(str(out)) if name.startswith('events')]) == 1  # the chief's


def moved(graph, target):
  """Bytes of the tensors that running `target` sends from parameter servers to the worker, and back."""
  job = lambda op: tf.DeviceSpec.from_string(op.device).job  # noqa: E731
  operations, todo, sent = set(), [target], {}
  while todo:
    op = todo.pop()
    if op not in operations:
      operations.add(op)
      todo += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
      sent.update(((tensor.name, job(op)), tensor) for tensor in op.inputs if job(tensor.op) != job(op))
  sizes = {'ps': 0, 'worker': 0}
  for (_, receiver), tensor in sent.items():
    if tensor.dtype != tf.resource:
      sizes[receiver] += tensor.shape.num_elements() * tensor.dtype.size
  return sizes['worker'], sizes['ps']


def test_variables_are_spread_over_the_servers_and_cross_the_network_once_a_step(small_data, full_size):
  jobs = {'ps': ['a:1', 'b:1'], 'worker': ['c:1', 'd:1']}
  cluster = train.Cluster(jobs, 'worker', 0)
  with tf.Graph().as_default() as graph, tf.device(cluster.device):
    data = train.data_input(str(small_data), 4, 10, True)
    model = train.build(data, ['/cpu:0', '/cpu:1'], 1, 0.1, 0.9, 0.5, cluster)
    on = dict.fromkeys(cluster.homes, 0)
    for variable in tf.trainable_variables():
      (home,) = [home for home in on if variable.op.device.startswith(home.split('/cpu')[0])]
      on[home] += 4 * variable.shape.num_elements()
    updates = [op for op in graph.get_operations() if op.type == 'ResourceApplyMomentum']
    down, up = moved(graph, cluster._contribute)
  assert abs(on[cluster.homes[0]] - on[cluster.homes[1]]) < 0.01 * 4 * 38947914
  for update in updates:
    assert len({op.device.lower() for op in (update, update.inputs[0].op, update.inputs[1].op, update.inputs[3].op)}) == 1
  parameters = 4 * 38947914
  assert down == parameters and parameters < up < parameters + 1000  # tickets
  # The update itself moves only the numbers of the report.
  assert max(moved(graph, model.train_op)) < 1000


# ---- processes die


@processes
@pytest.mark.parametrize(
  'sizes, long',
  [({'ps': 2, 'chief': 1, 'worker': 2}, False), pytest.param({'ps': 1, 'worker': 2}, True, marks=pytest.mark.long)],
)
def test_killed_workers_chiefs_and_parameter_servers_come_back_and_train_to_the_last_step(tmp_path, sizes, long):
  data, out = tmp_path / 'data', tmp_path / 'out'
  data.mkdir()
  write_small_data(data)
  chief, other = 'chief' if 'chief' in sizes else 'worker', ('worker', 1)
  workers = sizes['worker'] + sizes.get('chief', 0)
  # The last worker takes more images than the others.
  images = {'all': 2 * workers + 1, 'without the last': 2 * workers - 2}

  with Cluster(tmp_path, **sizes) as cluster:

    def start(*task, more=()):
      arguments = ['--data_dir', data, '--checkpoint_dir', out, '--epochs', 1000, '--save_steps', 1]
      cluster.start(*task, *arguments, '--batch_size', 3 if task == other else 2, *more)

    def one_more_save():
      saved = newest_step(out)
      cluster.wait_for(lambda: newest_step(out) > saved)

    for job in sizes:
      for index in range(sizes[job]):
        start(job, index)
    cluster.wait_for(lambda: newest_step(out) > 0)
    assert value_at(out, 1, 'images_seen') == images['all'] and value_at(out, 1, 'global_step') == 1
    # A worker: training goes on without it, and with it again.
    assert cluster.signal(*other) == -signal.SIGKILL
    name = 'worker 1 at %s ' % cluster.jobs['worker'][1]
    cluster.wait_for(lambda: name + 'does not answer' in cluster.text(chief, 0))
    one_more_save()
    if not long:
      # Updates leave two cores little for a start, so worker 0 pauses meanwhile. It still answers, so the chief waits for it.
      cluster.processes['worker', 0].send_signal(signal.SIGSTOP)
    start(*other)
    cluster.wait_for(lambda: name + 'is back' in cluster.text(chief, 0))
    if not long:
      cluster.processes['worker', 0].send_signal(signal.SIGCONT)
      assert cluster.text(chief, 0).count('does not answer') == 1
    one_more_save()
    # The chief: it resumes from its last checkpoint, and the workers go on.
    assert cluster.signal(chief, 0) == -signal.SIGKILL
    saved = network.checkpoint_step(network.resume_point(str(out)))  # of a save that was cut there may be whole files, too
    images_seen = value_at(out, saved, 'images_seen')
    resuming = 'resuming ' + str(out / 'model.ckpt-%d, step %d of ')
    if long:
      start(chief, 0)
      one_more_save()
      assert resuming % (saved, saved) in cluster.text(chief, 0)
      # The chief's data: its end is not that of training.
      data.rename(tmp_path / 'gone')
      os.mkdir(str(data))
      assert cluster.processes[chief, 0].wait(PROCESS_SECONDS) == 1
      (line,) = [line for line in cluster.text(chief, 0).splitlines() if line.startswith('error: ')]
      assert 'reading the training data failed' in line and str(data) in line and 'No such file' in line
      time.sleep(2)
      assert cluster.processes['ps', 0].poll() is None and cluster.processes[other].poll() is None
      os.rmdir(str(data))
      (tmp_path / 'gone').rename(data)
      start(chief, 0)
      one_more_save()
      # The parameter server: both say so and start again when it is back.
      assert cluster.signal('ps', 0) == -signal.SIGKILL
      line = 'waiting for ps 0 at %s' % cluster.jobs['ps'][0]
      cluster.wait_for(lambda: line in cluster.text(chief, 0) and line in cluster.text(*other))
      start('ps', 0)
      one_more_save()
      # Again, so soon that nobody has looked.
      assert cluster.signal('ps', 0) == -signal.SIGKILL
      start('ps', 0)
      cluster.wait_for(lambda: all(cluster.text(*task).count('lost a parameter server') == 2 for task in [(chief, 0), other]))
      one_more_save()
      assert cluster.signal(chief, 0) == -signal.SIGKILL
      saved = network.checkpoint_step(network.resume_point(str(out)))
      images_seen = value_at(out, saved, 'images_seen')
    # Two steps more. A chief takes all workers to be like itself, so it expects --epochs to take three, until it has counted.
    last = saved + 2
    end = ['--epochs', (images_seen + 2 * images['all'] - 0.5) / 200] if long else ['--max_steps', last]
    assert not (out / network.TRAINING_DONE).exists()
    start(chief, 0, more=end)
    assert set(cluster.ends()) == {0}
    text = cluster.text(chief, 0)
    assert resuming % (saved, saved) + '%d\n' % (last + long) in text and 'step %d/%d ' % (last, last) in text
    assert 'global batch %d;' % (2 * workers) in text
    if long:
      # With nothing left to do: all wait for the last worker to come, and end.
      for task in [('ps', 0), (chief, 0)]:
        start(*task, more=end)
      cluster.wait_for(lambda: 'nothing to do' in cluster.text(chief, 0))
      start(*other)
      assert set(cluster.ends()) == {0}
    for task in cluster.processes:
      assert_readable(cluster.text(*task))
  # Every worker had its share in every update, and no more.
  assert newest_step(out) == last and value_at(out, last, 'global_step') == last and (out / network.TRAINING_DONE).exists()
  assert value_at(out, last, 'images_seen') == images_seen + 2 * images['all']
  with tf.Graph().as_default():
    assert val.Validation(str(data), 40, 2, None)(str(out))['total'] == 40
  if not long:
    # Each update took the images of all workers or, while the last was out, of the others.
    out_for = (saved * images['all'] - images_seen) / (images['all'] - images['without the last'])
    assert out_for in range(1, saved - 1)


@processes
def test_a_parameter_server_stays_until_every_worker_has_ended(tmp_path):
  with Cluster(tmp_path, ps=1, worker=2) as cluster:
    cluster.start('ps', 0)
    cluster.wait_for(lambda: 'listens' in cluster.text('ps', 0))
    with socket.socket() as worker:  # that lives on after the end of training, to close its session
      worker.bind(('127.0.0.1', int(cluster.jobs['worker'][1].split(':')[1])))
      worker.listen(100)
      config = tf.ConfigProto(device_filters=['/job:ps'])
      with tf.Graph().as_default(), tf.Session('grpc://' + cluster.jobs['ps'][0], config=config) as session:
        session.run(train.Cluster(cluster.jobs, 'worker', 0)._leave_queue('/job:ps/task:0/cpu:0').enqueue(True))
      time.sleep(3)
      assert cluster.processes['ps', 0].poll() is None
    assert cluster.ends() == [0]


@processes
@pytest.mark.parametrize('ended', [[0], pytest.param([0, 1], marks=pytest.mark.long)])
def test_signals_end_who_waits_and_all_at_once_after_a_save(tmp_path, ended):
  write_small_data(tmp_path)
  out = tmp_path / 'out'
  arguments = ['--data_dir', tmp_path, '--checkpoint_dir', out, '--batch_size', 2]
  with Cluster(tmp_path, ps=1, worker=2) as cluster:
    for index in range(2):
      cluster.start('worker', index, *arguments)
    cluster.wait_for(lambda: all('waiting for ps 0' in cluster.text('worker', k) for k in range(2)))
    for index in ended:
      assert cluster.signal('worker', index, signal.SIGTERM) == 143
      cluster.start('worker', index, *arguments)
    cluster.start('ps', 0)
    cluster.wait_for(lambda: 'step 1/' in cluster.text('worker', 0))
    # A worker leaves; then all at once, and the chief saves before its parameter server goes.
    assert cluster.signal('worker', 1, signal.SIGINT) == 130
    cluster.wait_for(lambda: 'worker 1 at %s has left' % cluster.jobs['worker'][1] in cluster.text('worker', 0))
    for process in cluster.processes.values():
      process.send_signal(signal.SIGTERM)
    assert sorted(cluster.ends()) == [130, 143, 143]
    (saved,) = map(int, re.findall(r'saved step (\d+) in ', cluster.text('worker', 0)))
    assert newest_step(out) == saved > 0 and value_at(out, saved, 'global_step') == saved
    assert not (out / network.TRAINING_DONE).exists()
    for task in cluster.processes:
      assert_readable(cluster.text(*task))


# ---- what is wrong with a TF_CONFIG


@pytest.mark.parametrize(
  'config, words',
  [
    ('{"cluster": ', 'no JSON'),
    ('[1]', 'must be'),
    ('{"cluster": {"ps": ["a:1"], "wrker": ["b:1"]}, "task": {"type": "ps", "index": 0}}', "'wrker'"),
    ('{"cluster": {"ps": ["a:1"], "worker": ["b"]}, "task": {"type": "ps", "index": 0}}', '["b"]'),
    ('{"cluster": {"ps": ["a:1"], "worker": "b:1"}, "task": {"type": "ps", "index": 0}}', '"b:1"'),
    ('{"cluster": {"ps": [], "worker": ["b:1"]}, "task": {"type": "ps", "index": 0}}', '[]'),
    ('{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 1}}', '"index": 1'),
    ('{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": -1}}', '"index": -1'),
    ('{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "boss", "index": 0}}', '"boss"'),
    ('{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}}', 'no "task"'),
    ('{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": ["ps"], "index": 0}}', '["ps"]'),
    ('{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "ps", "index": 1.0}}', '1.0'),
    ('{"cluster": {"worker": ["b:1"]}, "task": {"type": "worker", "index": 3}}', '"index": 3'),
    ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}', 'takes "ps"'),
    ('{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 0}}', 'workers'),
    ('{"cluster": {"ps": ["a:1"], "chief": ["b:1", "c:1"]}, "task": {"type": "chief", "index": 0}}', 'at most one "chief"'),
  ],
)
def test_a_wrong_tf_config_is_quoted(config, words):
  with pytest.raises(train.flags.Error) as raised:
    train.read_tf_config(config)
  assert 'TF_CONFIG' in str(raised.value) and words in str(raised.value)


def test_a_right_tf_config_names_the_task():
  jobs = {'ps': ['a:1'], 'worker': ['b:1', 'c:1']}
  config = {'cluster': dict(jobs, evaluator=['d:1']), 'task': {'type': 'worker', 'index': 1}, 'environment': 'cloud'}
  assert train.read_tf_config(json.dumps(config)) == (jobs, 'worker', 1)
  config['task']['index'] = '1'  # as some schedulers write it
  assert train.read_tf_config(json.dumps(config)) == (jobs, 'worker', 1)
  assert train.read_tf_config(json.dumps({'task': {'type': 'evaluator'}}))[1] == 'evaluator'
  for alone in ('', '{}', '{"cluster": {}}', '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'):
    assert train.read_tf_config(alone) is None


def test_an_address_in_use_is_a_clean_error():
  with socket.socket() as taken:
    taken.bind(('', 0))
    taken.listen(1)
    port = taken.getsockname()[1]
    config = {'cluster': {'ps': ['127.0.0.1:%d' % port], 'worker': ['127.0.0.1:1']}, 'task': {'type': 'ps', 'index': 0}}
    line = clean_error('train.py', env={'TF_CONFIG': json.dumps(config)})
  assert 'ps 0 at 127.0.0.1:%d cannot listen on port %d' % (port, port) in line and 'Address already in use' in line
