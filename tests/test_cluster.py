"""train.py under TF_CONFIG: several processes on this machine, each a worker, whose gradients are averaged."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from conftest import (
  PROCESS_SECONDS,
  ROOT,
  assert_readable,
  call,
  command,
  environment,
  updates,
  values_of,
)

import network
import train

# Its other workers are reached although a proxy is set that nobody listens at.
BEHIND_A_PROXY = {'http_proxy': 'http://127.0.0.1:9', 'https_proxy': 'http://127.0.0.1:9', 'TF_CPP_MIN_LOG_LEVEL': '3'}


def free_ports(count):
  sockets = [socket.socket() for _ in range(count)]
  for one in sockets:
    one.bind(('127.0.0.1', 0))
  ports = [one.getsockname()[1] for one in sockets]
  for one in sockets:
    one.close()
  return ports


def listens(port):
  with socket.socket() as probe:
    return probe.connect_ex(('127.0.0.1', port)) == 0


def wait_until(condition, say=str):
  """Waits until `condition()` is true; where it stays false for too long, fails with `say()`."""
  end = time.time() + PROCESS_SECONDS
  while not condition():
    assert time.time() < end, say()
    time.sleep(0.1)


# ---- updates, by processes that build the graph of train.py on fixed records

# Arguments: the rank, the addresses of both workers, a folder for results.
TWO_WORKERS = """
import os, sys
rank, addresses, folder = int(sys.argv[1]), sys.argv[2:4], sys.argv[4]
import conftest, network, train
import numpy as np
import tensorflow.compat.v1 as tf

workers = train.AllReduce([('worker %d' % i, address) for i, address in enumerate(addresses)], 'worker %d' % rank, 2)

def build(first, towers, batch, spoilt=False):
  workers.agree([0, 0], {'--epochs': 1}, towers * batch)
  data = conftest.FixedData(batch, first)
  if spoilt:
    data.images[:] = np.nan
  devices = ['/cpu:%d' % i for i in range(towers)]
  return train.build(data, devices, 1, 0.1, 0.9, 1, 16, workers.all_reduce)

def run(model, steps, name):
  # Only the first worker has the values to start with.
  shared = workers.broadcast(tf.global_variables())
  variables = {variable.op.name: variable for variable in tf.global_variables()}
  with tf.Session(workers.target, config=workers.session_config(2)) as session:
    session.run(tf.global_variables_initializer())
    if rank == 0:
      values = conftest.start_values({v.op.name: v.shape.as_list() for v in tf.trainable_variables()})
      for variable in tf.trainable_variables():
        variable.load(values[variable.op.name], session)
    session.run(shared)
    for step in range(1, steps + 1):
      _, report = session.run([model.train_op, model.report], {model.signalled: float(rank == 1 and step == 1)})
      if step in (1, steps):
        np.savez(os.path.join(folder, '%s-%d-%d.npz' % (name, step, rank)), **session.run(variables))
        np.savez(os.path.join(folder, '%s-report-%d-%d.npz' % (name, step, rank)), **report)

try:
  workers.agree([0, 0], {'--epochs': 1, '--momentum': 0.9 - 0.4 * rank}, 1)
except train.flags.Error as error:
  print(error)

for name, parts, steps in (('equal', [(0, 1, 8), (8, 1, 8)], 10), ('unequal', [(0, 1, 6), (6, 2, 5)], 1)):
  with tf.Graph().as_default(), tf.device(workers.device):
    run(build(*parts[rank]), steps, name)

with tf.Graph().as_default(), tf.device(workers.device):
  model = build(0, 1, 8, spoilt=rank == 1)
  writer = network.CheckpointWriter(os.path.join(folder, 'checkpoints'), 5) if rank == 0 else None
  stop = train.StopHook(model, 3)
  try:
    train.train(workers, model, [stop, train.CheckpointHook(model.report, writer, 1, 3)], None, 1)
  except train.flags.Error as error:
    print(error)

network.BLOCKS, network.DENSE = conftest.FULL_SIZE
with tf.Graph().as_default(), tf.device(workers.device):
  model = build(0, 1, 2)
  with tf.train.SingularMonitoredSession([workers], None, workers.target, workers.session_config(1)) as session:
    print('full size', flush=True)
    sys.stdin.readline()
    session.run(model.train_op)
"""


class Counter(object):
  """Forwards connections to a port of this machine and counts what passes: [what comes to the port, what it answers]."""

  def __init__(self, port, target):
    self.bytes = [0, 0]
    self._target = target
    self._listener = socket.socket()
    self._listener.bind(('127.0.0.1', port))
    self._listener.listen(50)
    threading.Thread(target=self._accept, daemon=True).start()

  def _accept(self):
    while True:
      here, _ = self._listener.accept()
      there = socket.create_connection(('127.0.0.1', self._target))
      for direction, ends in enumerate([(here, there), (there, here)]):
        threading.Thread(target=self._forward, args=(direction,) + ends, daemon=True).start()

  def _forward(self, direction, source, sink):
    try:
      for block in iter(lambda: source.recv(1 << 20), b''):
        self.bytes[direction] += len(block)
        sink.sendall(block)
      sink.shutdown(socket.SHUT_WR)
    except OSError:  # one side has ended
      pass


@pytest.fixture(scope='module')
def two_workers(tmp_path_factory):
  """Runs TWO_WORKERS. Returns the folder of results, what each printed, and the bytes that each received of full-size gradients."""
  folder = tmp_path_factory.mktemp('two workers')
  (folder / 'two_workers.py').write_text(TWO_WORKERS)
  ports, seen_by_other = free_ports(2), free_ports(2)
  processes = []
  for rank in range(2):
    addresses = ['127.0.0.1:%d' % (ports[i] if i == rank else seen_by_other[i]) for i in range(2)]
    paths = os.pathsep.join([ROOT, os.path.join(ROOT, 'tests')])
    processes.append(subprocess.Popen(
      [sys.executable, str(folder / 'two_workers.py'), str(rank)] + addresses + [str(folder)],
      env=environment(PYTHONPATH=paths, **BEHIND_A_PROXY), encoding='utf-8', stdin=subprocess.PIPE, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE))  # fmt: skip
  try:
    for port in ports:
      wait_until(lambda port=port: listens(port))
    counters = [Counter(*ends) for ends in zip(seen_by_other, ports)]

    def bytes_received():
      first, second = (np.array(counter.bytes) for counter in counters)
      return first + second[::-1]

    printed = [[], []]
    for rank, process in enumerate(processes):
      for line in process.stdout:
        if line == 'full size\n':
          break
        printed[rank].append(line)
    before = bytes_received()
    for process in processes:
      process.stdin.write('\n')
      process.stdin.flush()
    for process in processes:
      stdout, stderr = process.communicate(timeout=PROCESS_SECONDS)
      assert process.returncode == 0 and not stdout, stderr
      assert_readable(stderr)
    return folder, printed, bytes_received() - before
  finally:
    for process in processes:
      process.kill()
      process.communicate()


def result(two_workers, name):
  with np.load(str(two_workers[0] / (name + '.npz'))) as values:
    return dict(values)


@pytest.mark.parametrize('parts', ['equal', 'unequal'])  # 8 and 8 images; 6 on one tower and 10 on two
def test_workers_make_the_update_of_one_process_with_all_their_images(two_workers, parts):
  _, one = updates(1, 1)
  for rank in range(2):
    values, report = result(two_workers, '%s-1-%d' % (parts, rank)), result(two_workers, '%s-report-1-%d' % (parts, rank))
    assert sorted(values) == sorted(one.values)
    for name, value in one.values.items():
      assert np.linalg.norm(values[name] - value) <= 1e-4 * np.linalg.norm(value), name
    assert report.pop('signalled') > 0  # though only the second was told
    one.report.pop('signalled', None)
    # Weighted by the images of each worker, as all that is reported.
    one.report['queue_fill'] = {'equal': (8 * 1 / 16 + 8 * 9 / 16) / 16, 'unequal': (6 * 1 / 16 + 10 * 7 / 16) / 16}[parts]
    assert report == {name: pytest.approx(value, rel=1e-4) for name, value in one.report.items()}


def test_after_ten_steps_all_workers_hold_the_same_bits(two_workers):
  first, second = (result(two_workers, 'equal-10-%d' % rank) for rank in range(2))
  assert first['global_step'] == 10 and first['images_seen'] == 160
  assert sorted(first) == sorted(second) and all(first[name].tobytes() == second[name].tobytes() for name in first)
  assert not np.array_equal(first['fc8/biases'], result(two_workers, 'equal-1-0')['fc8/biases'])


def test_a_worker_with_other_flags_than_the_chief_is_refused(two_workers):
  assert two_workers[1][1][0].startswith('--momentum is 0.5 here but 0.9 at worker 0 at 127.0.0.1:')


def test_a_nan_on_one_worker_ends_all_with_the_same_words_and_is_not_saved(two_workers):
  folder, printed, _ = two_workers
  assert printed[0] == printed[1][-1:] and printed[0][0].startswith('step 1: loss or weights are not finite')
  assert os.listdir(str(folder / 'checkpoints')) == []


def test_a_step_moves_each_gradient_once_in_each_direction(two_workers):
  # A worker of N sends 2 (N - 1) / N times the gradients: of two, each sends all of its 38,947,914 numbers.
  assert list(two_workers[2]) == pytest.approx([4 * 38947914] * 2, rel=0.03)


# ---- processes that die


class Cluster(object):
  """Starts and kills train.py, narrow, on free ports; its messages go to files in `folder`."""

  def __init__(self, folder, size, arguments):
    chief, *workers = ['127.0.0.1:%d' % port for port in free_ports(size)]
    self._jobs = {'chief': [chief], 'worker': workers, 'evaluator': ['nowhere:1']}
    self.arguments = arguments
    self._folder = folder
    self.names = ['chief 0 at ' + chief] + ['worker %d at %s' % pair for pair in enumerate(workers)]
    self.processes = [None] * size

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process in self.processes:
      process.kill()
      process.wait()

  def start(self, *ranks):
    for rank in ranks:
      self._start(rank)

  def _start(self, rank):
    task = {'type': 'worker', 'index': rank - 1} if rank else {'type': 'chief', 'index': 0}
    config = json.dumps({'cluster': self._jobs, 'task': task})
    with open(str(self._folder / ('%d.log' % rank)), 'ab') as log:
      self.processes[rank] = subprocess.Popen(command('train.py', *self.arguments), stdout=log, stderr=log,
                                              env=environment(TF_CONFIG=config, **BEHIND_A_PROXY))  # fmt: skip

  def kill(self, rank):
    self.processes[rank].kill()
    self.processes[rank].wait()

  def text(self, rank):
    return (self._folder / ('%d.log' % rank)).read_text()

  def statuses(self):
    """Waits until all processes have ended."""
    self.wait_until(lambda: all(process.poll() is not None for process in self.processes))
    return [process.returncode for process in self.processes]

  def wait_until(self, condition):
    wait_until(condition, lambda: '\n'.join('== %d\n%s' % (rank, self.text(rank)) for rank in range(len(self.names))))


def test_who_is_lost_is_named_and_waited_for_and_a_signal_ends_all_after_the_same_step(tmp_path, small_data):
  out = tmp_path / 'out'
  arguments = ['--data_dir', small_data, '--checkpoint_dir', out, '--batch_size', 2, '--epochs', 1e5]
  arguments += ['--max_steps', 30000, '--save_steps', 5]
  with Cluster(tmp_path, 3, arguments) as cluster:

    def newest_step():
      return max(network.checkpoint_step(prefix) for prefix in network.list_checkpoints(str(out)) or [''])

    def one_more_save():
      saved = newest_step()
      cluster.wait_until(lambda: newest_step() > saved)

    def says(rank, *words):
      return ' '.join(words) in cluster.text(rank)

    def waits_after_loss(rank, lost):
      after = cluster.text(rank).partition('warning: lost %s; starting again' % lost)[2]
      return 'waiting for %s\n' % lost in after

    cluster.start(0, 1, 2)
    one_more_save()
    # A worker is killed: the two others say so, start again and wait for it; then a second ends, while it waits.
    cluster.kill(2)
    saved = newest_step()
    for rank in (0, 1):
      cluster.wait_until(lambda rank=rank: waits_after_loss(rank, cluster.names[2]))
    cluster.processes[1].send_signal(signal.SIGTERM)
    assert cluster.processes[1].wait(PROCESS_SECONDS) == 143
    cluster.wait_until(lambda: says(0, 'waiting for', cluster.names[1] + ',', cluster.names[2] + '\n'))
    cluster.start(1, 2)
    one_more_save()
    assert says(0, 'resuming', os.path.join(str(out), 'model.ckpt-%d,' % saved), 'step %d of ' % saved)
    assert says(2, "resuming the chief's checkpoint, step %d of " % saved)
    # The chief.
    cluster.kill(0)
    for rank in (1, 2):
      cluster.wait_until(lambda rank=rank: waits_after_loss(rank, cluster.names[0]))
    cluster.start(0)
    one_more_save()
    # A signal to a worker that is not the chief.
    cluster.processes[1].send_signal(signal.SIGTERM)
    assert cluster.statuses() == [0, 143, 0]
    for rank in range(3):
      assert_readable(cluster.text(rank))
    (ended,) = re.findall(r'^saved step (\d+) in ', cluster.text(0), re.M)
    assert 'saved step' not in cluster.text(1) + cluster.text(2)
  values = values_of(out)
  # Six images an update, whatever has happened meanwhile.
  assert values['global_step'] == newest_step() == int(ended) and values['images_seen'] == 6 * int(ended)
  assert not (out / network.TRAINING_DONE).exists()
  assert len([name for name in os.listdir(str(out)) if name.startswith('events')]) == 3  # of the chief's three starts


def test_training_ends_by_itself_and_a_signal_to_all_is_no_loss(tmp_path, small_data):
  out = tmp_path / 'out'
  arguments = ['--data_dir', small_data, '--checkpoint_dir', out, '--batch_size', 2, '--epochs', 1e5, '--save_steps', 5]
  with Cluster(tmp_path, 2, arguments) as cluster:
    cluster.start(0, 1)
    cluster.wait_until(lambda: network.list_checkpoints(str(out)))
    for process in cluster.processes:
      process.send_signal(signal.SIGTERM)
    assert cluster.statuses() == [143, 143]
    (stopped,) = re.findall(r'^saved step (\d+) in ', cluster.text(0), re.M)
    assert network.checkpoint_step(network.find_checkpoint(str(out))) == int(stopped)
    assert not (out / network.TRAINING_DONE).exists()
    last = int(stopped) + 5
    cluster.arguments += ['--max_steps', last]
    cluster.start(0, 1)
    assert cluster.statuses() == [0, 0]
    assert 'step %s of %d\n' % (stopped, last) in cluster.text(1) and 'saved step %d in ' % last in cluster.text(0)
    assert (out / network.TRAINING_DONE).exists()
    for rank in range(2):
      assert 'lost' not in cluster.text(rank)
      assert_readable(cluster.text(rank))


# ---- what is wrong with a TF_CONFIG


@pytest.mark.parametrize(
  'config, words',
  [
    ('{"cluster": ', 'must be'),
    ('[1]', 'must be'),
    ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": 3}', 'must be'),
    ('{"cluster": {"chief": ["a:1"], "wrker": ["b:1"]}, "task": {"type": "chief", "index": 0}}', 'must be'),
    ('{"cluster": {"worker": ["a:1", "b"]}, "task": {"type": "worker", "index": 0}}', 'must be'),
    ('{"cluster": {"worker": ["a:1", "b:x"]}, "task": {"type": "worker", "index": 0}}', 'must be'),
    ('{"cluster": {"worker": ["a:1", "b:70000"]}, "task": {"type": "worker", "index": 0}}', 'must be'),
    ('{"cluster": {"worker": ["a:1", ":2"]}, "task": {"type": "worker", "index": 0}}', 'must be'),
    ('{"cluster": {"worker": ["a:1", "b:2/x"]}, "task": {"type": "worker", "index": 0}}', 'must be'),
    ('{"cluster": {"worker": ["a:1", 7]}, "task": {"type": "worker", "index": 0}}', 'must be'),
    ('{"cluster": {"worker": "b:1"}, "task": {"type": "worker", "index": 0}}', 'must be'),
    ('{"cluster": {"chief": [], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}', 'must be'),
    ('{"cluster": {"chief": ["b:1", "c:1"]}, "task": {"type": "chief", "index": 0}}', 'must be'),
    ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}', '"index": 2'),
    ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": -1}}', '"index": -1'),
    ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1.0}}', '1.0'),
    ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "boss", "index": 0}}', '"boss"'),
    ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": ["worker"], "index": 0}}', '["worker"]'),
    ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 3}}', '"index": 3'),
    ('{"cluster": {"worker": ["a:1", "b:1"]}}', 'task'),
    ('{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}', 'no parameter servers'),
    ('{"cluster": {"ps": ["a:1"], "chief": ["b:1"]}, "task": {"type": "chief", "index": 0}}', '"worker": ["host:port", ...]'),
  ],
)
def test_a_wrong_tf_config_is_quoted(config, words):
  with pytest.raises(train.flags.Error) as raised:
    train.read_tf_config(config)
  assert 'TF_CONFIG' in str(raised.value) and words in str(raised.value)


def test_a_right_tf_config_names_the_workers_and_this_one():
  config = {'cluster': {'worker': ['b:1', '[::1]:2'], 'chief': ['a:1'], 'evaluator': ['d:1']},
            'task': {'type': 'worker', 'index': 1}, 'environment': 'cloud'}  # fmt: skip
  workers = [('chief 0', 'a:1'), ('worker 0', 'b:1'), ('worker 1', '[::1]:2')]
  assert train.read_tf_config(json.dumps(config)) == (workers, 'worker 1')
  config['task']['index'] = '1'  # as some schedulers write it
  assert train.read_tf_config(json.dumps(config)) == (workers, 'worker 1')
  assert train.read_tf_config(json.dumps({'task': {'type': 'evaluator'}})) == ([], 'evaluator 0')
  alone = ['', '{}', '{"cluster": {}}', '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}']
  for text in alone + ['{"cluster": {"chief": ["a:1"]}}']:
    assert train.read_tf_config(text)[0] == []


def test_a_parameter_server_of_an_old_manifest_ends_well(monkeypatch, capsys):
  # Where one GPU is visible it would be wrong to ask for three; a parameter server needs none.
  monkeypatch.setattr(tf.config.experimental, 'list_physical_devices', lambda kind: [kind])
  monkeypatch.setenv('TF_CONFIG', '{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "ps", "index": 0}}')
  with pytest.raises(SystemExit) as end:
    call(train, '--num_gpus', 3)
  assert end.value.code == 0 and 'ps 0 has nothing to do' in capsys.readouterr().err


def test_an_address_in_use_is_a_clean_error(monkeypatch):
  monkeypatch.setattr(os, 'environ', dict(os.environ))  # where it names hosts that are reached without a proxy
  with socket.socket() as taken:
    taken.bind(('', 0))
    taken.listen(1)
    address = '127.0.0.1:%d' % taken.getsockname()[1]
    try:
      with pytest.raises(train.flags.Error, match='worker 0 at %s cannot listen: .*Address already in use' % address):
        train.AllReduce([('worker 0', address), ('worker 1', 'b:1')], 'worker 0', 1)
    finally:
      signal.set_wakeup_fd(-1)
