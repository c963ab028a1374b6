import os
import re
import shutil
import subprocess
import time

import numpy as np
import pandas as pd
import pytest
import tensorflow.compat.v1 as tf
from conftest import TIMEOUT, assert_readable, clean_error, command, logits_of, mistake, random_records, run_script
from PIL import Image

import network
import val
from data_input import CLASSES


@pytest.fixture(scope='module')
def test_set(tmp_path_factory):
  """A folder whose test_batch.bin holds 37 records; their labels and images."""
  folder = tmp_path_factory.mktemp('37 records')
  return (folder,) + random_records(folder / 'test_batch.bin', 37, seed=4)


def numbers(stdout):
  """Right ones, records and cross-entropy of a report."""
  accuracy = re.search(r'accuracy (\d+) / (\d+) = ', stdout)
  return int(accuracy.group(1)), int(accuracy.group(2)), float(re.search(r'cross-entropy (\S+)', stdout).group(1))


def confusion_of(stdout):
  """The confusion matrix of a report."""
  rows = stdout.split('confusion matrix')[1].splitlines()[2:12]
  assert [row.split()[0] for row in rows] == CLASSES
  return [[int(word) for word in row.split()[1:]] for row in rows]


def test_score_by_numbers():
  logits = np.array([[0, 0, 1000], [1, 3, 2], [0, 0, 0]], np.float32)
  result = val.score(np.array([2, 2, 1]), logits)
  assert (result['correct'], result['total'], result['accuracy']) == (1, 3, 1 / 3)
  assert result['cross_entropy'] == pytest.approx((0 + np.log(np.exp([-1, 1, 0]).sum()) + np.log(3)) / 3, rel=1e-6)
  assert result['confusion'].tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 1]]


def test_the_report_agrees_with_numpy_for_any_batch_size(test_set, wide_awake):
  folder, labels, images = test_set
  logits = logits_of(network.find_checkpoint(wide_awake), images).astype(np.float64)
  predicted = logits.argmax(1)
  assert len(set(predicted)) >= 3  # or the comparison would be of one class only
  losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(37), labels]
  before = {name: open(os.path.join(wide_awake, name), 'rb').read() for name in os.listdir(wide_awake) if 'model' in name}

  outputs = set()
  for num_threads, batch_size in ((16, 8), (4, 100)):  # more in test_faults.py, in one process
    done = run_script('val.py', '--checkpoint_dir', wide_awake, '--data_dir', folder, '--batch_size', batch_size,
                      '--num_threads', num_threads)  # fmt: skip
    outputs.add(done.stdout)
  assert_readable(done.stderr)
  assert len(outputs) == 1
  (stdout,) = outputs
  assert numbers(stdout) == ((predicted == labels).sum(), 37, pytest.approx(losses.mean(), abs=1e-4))
  assert (
    confusion_of(stdout) == pd.crosstab(labels, predicted).reindex(range(10), columns=range(10), fill_value=0).values.tolist()
  )
  assert {name: open(os.path.join(wide_awake, name), 'rb').read() for name in before} == before


def test_the_same_is_written_for_tensorboard(test_set, wide_awake, tmp_path):
  folder = shutil.copytree(wide_awake, str(tmp_path / 'copy'), ignore=shutil.ignore_patterns('eval'))
  done = run_script('val.py', os.path.join(folder, 'model.ckpt-7'), '--data_dir', test_set[0])
  correct, total, cross_entropy = numbers(done.stdout)
  (path,) = os.listdir(os.path.join(folder, 'eval'))
  values = {}
  for event in tf.train.summary_iterator(os.path.join(folder, 'eval', path)):
    for value in event.summary.value:
      assert event.step == 7
      values[value.tag] = value
  assert values['accuracy'].simple_value == pytest.approx(correct / total)
  assert values['cross_entropy'].simple_value == pytest.approx(cross_entropy, abs=1e-4)
  of_class = [values['class_accuracy/' + name].simple_value for name in CLASSES]
  confusion = np.array(confusion_of(done.stdout))
  np.testing.assert_allclose(of_class, confusion.diagonal() / confusion.sum(1), rtol=1e-6)
  text = tf.make_ndarray(values['confusion_matrix'].tensor)[0].decode()
  assert [[int(n) for n in row.split('|')[1:]] for row in text.splitlines()[2:]] == confusion.tolist()


@pytest.fixture
def three_checkpoints(wide_awake, tmp_path):
  """A folder of steps 7, 8 and 20: of one network, of it with shifted logits, and of it again."""
  folder = shutil.copytree(wide_awake, str(tmp_path / 'three'), ignore=shutil.ignore_patterns('eval', 'checkpoint'))
  with tf.Graph().as_default(), tf.Session() as session:
    network.NETWORK(tf.placeholder(tf.float32, [None, 28, 28, 3]), None, 1, 10, False)
    saver = tf.train.Saver(max_to_keep=9)
    network.restore(session, tf.trainable_variables(), folder)
    saver.save(session, os.path.join(folder, 'model.ckpt'), 20, write_meta_graph=False)
    biases = [variable for variable in tf.trainable_variables() if variable.op.name == 'fc8/biases'][0]
    biases.load(np.eye(10)[4] * 1e4, session)
    saver.save(session, os.path.join(folder, 'model.ckpt'), 8, write_meta_graph=False)
  return folder


def test_all_ranks_every_checkpoint_and_names_the_best(test_set, three_checkpoints):
  done = run_script('val.py', '--all', '--checkpoint_dir', three_checkpoints, '--data_dir', test_set[0])
  reports = done.stdout.split('\n\n             ')
  assert len(re.findall(r'^accuracy ', done.stdout, re.M)) == 3, reports
  rows = [line.split() for line in done.stdout[done.stdout.rindex('checkpoint accuracy') :].splitlines()[1:-1]]
  found = {int(row[0].rsplit('-', 1)[1]): row[1:] for row in rows}
  assert sorted(found) == [7, 8, 20] and found[7] == found[20] != found[8]
  # Step 8 always says deer: 4 of 37.
  assert found[8][0] == '10.81%'
  accuracies = [float(row[1][:-1]) for row in rows]
  assert accuracies == sorted(accuracies, reverse=True)
  assert done.stdout.splitlines()[-1] == 'best: ' + rows[0][0]


def test_watch_validates_each_new_checkpoint_once_until_training_is_done(test_set, three_checkpoints, tmp_path):
  folder, arguments = tmp_path / 'watched', ['--checkpoint_dir', tmp_path / 'watched', '--data_dir', test_set[0]]
  # A cluster's evaluator does the same.
  evaluator = dict(os.environ, TF_CONFIG='{"cluster": {"chief": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}')
  outs, processes = [tmp_path / 'out of val.py', tmp_path / 'out of train.py'], []
  try:
    for out, words, environ in zip(outs, [['val.py', '--watch'], ['train.py']], [None, evaluator]):
      with open(str(out), 'w') as f:
        processes.append(subprocess.Popen(command(*words, *arguments), stdout=f, stderr=subprocess.PIPE, env=environ))
    for step in (7, 20):
      folder.mkdir(exist_ok=True)
      for name in ('.data-00000-of-00001', '.index'):
        shutil.copy(os.path.join(three_checkpoints, 'model.ckpt-%d' % step) + name, str(folder))
      for _ in range(300):
        if all('model.ckpt-%d\naccuracy' % step in out.read_text() for out in outs):
          break
        time.sleep(0.2)
    (folder / network.TRAINING_DONE).touch()
    for process, out in zip(processes, outs):
      stderr = process.communicate(timeout=TIMEOUT)[1].decode()
      assert process.returncode == 0, stderr
      assert_readable(stderr)
      assert re.findall(r'model.ckpt-(\d+)', out.read_text()) == ['7', '20']
  finally:
    for process in processes:
      process.kill()
      process.wait()


def test_wrong_input_is_a_clean_error(test_set, wide_awake, tmp_path):
  folder = test_set[0]
  (tmp_path / 'empty').mkdir()
  for path in ('missing', 'empty', 'empty/model.ckpt-3'):
    line = mistake(val, '--checkpoint_dir', tmp_path / path, '--data_dir', folder)
    assert str(tmp_path / path) in line and 'train.py' in line
  assert clean_error('val.py', tmp_path / path, '--data_dir', folder) == 'error: ' + line
  assert '--watch' in mistake(val, '--all', '--watch')
  assert '--errors' in mistake(val, wide_awake, '--data_dir', folder, '--errors', tmp_path / 'errors.png', '--all')
  assert 'test_batch.bin is a file' in mistake(val, wide_awake, '--data_dir', folder / 'test_batch.bin')
  for path in (os.path.join(wide_awake, 'model.ckpt-7'), os.path.join(wide_awake, 'model.ckpt-7.index')):
    assert 'take a folder' in mistake(val, '--all', path)
  assert 'take a folder' in mistake(val, '--watch', folder / 'test_batch.bin')
  assert 'rename' in mistake(val, '--watch', tmp_path / 'run [1]')


def test_a_report_is_printed_where_summaries_cannot_be_written(test_set, wide_awake, tmp_path):
  folder = shutil.copytree(wide_awake, str(tmp_path / 'copy'), ignore=shutil.ignore_patterns('eval'))
  with open(os.path.join(folder, 'eval'), 'w') as f:
    f.write('a file')
  assert numbers(run_script('val.py', folder, '--data_dir', test_set[0]).stdout)[1] == 37


@pytest.mark.parametrize('runs', [2, pytest.param(10, marks=pytest.mark.long)])
def test_validation_during_training_that_deletes_checkpoints(test_set, resumable, small_data, runs):
  arguments = command('train.py', '--data_dir', small_data, '--checkpoint_dir', resumable, '--batch_size', 2, '--save_steps', 1,
                      '--keep_checkpoints', 1, '--max_steps', 100000)  # fmt: skip
  with subprocess.Popen(arguments, stderr=subprocess.PIPE) as process:
    steps = set()
    try:
      for run in range(100):
        done = run_script('val.py', '--checkpoint_dir', resumable, '--data_dir', test_set[0])
        assert numbers(done.stdout)[1] == 37
        steps.add(re.search(r'model.ckpt-(\d+)', done.stdout).group(1))
        if run + 1 >= runs and len(steps) > 1:
          break
      assert process.poll() is None
    finally:
      process.terminate()
      stderr = process.communicate(timeout=TIMEOUT)[1].decode()
  assert process.returncode == 143, stderr
  assert len(steps) > 1


# ---- the sheet of mistakes


def test_the_most_confident_mistakes_come_first_with_true_and_predicted_class(tmp_path):
  draw = np.random.RandomState(0)
  labels, images = np.array([3, 1, 2, 0]), draw.normal(size=[4, 28, 28, 3]).astype(np.float32)
  logits = np.zeros([4, 10], np.float32)
  logits[0, 5], logits[1, 1], logits[2, 4], logits[3, 9] = 2, 9, 6, 4  # record 1 is right, 2 the surest mistake, 0 the least
  path = str(tmp_path / 'errors.png')
  assert val.draw_errors(path, labels, logits, images, scale=5) == 3
  sheet = np.asarray(Image.open(path))
  height, width = 28 * 5 + 2 * 20 + 8, 28 * 5 + 8
  assert sheet.shape == (height, 8 * width, 3)
  for place, (record, truth, guess) in enumerate([(2, 'bird', 'deer'), (3, 'airplane', 'truck'), (0, 'cat', 'dog')]):
    tile = sheet[4:-4, place * width + 4 : (place + 1) * width - 4]
    assert (tile[2:140:5, 2:140:5] == (images[record] * 64 + 128).clip(0, 255).astype(np.uint8)).all()
    assert (tile[140:160] == val.draw_word(truth, 140, (255, 255, 255))).all()
    assert (tile[160:180] == val.draw_word(guess, 140, (255, 90, 80))).all()
  assert not sheet[:, 3 * width :].any()
  assert val.draw_errors(str(tmp_path / 'none'), labels[1:2], logits[1:2], images[1:2]) == 0
  assert not (tmp_path / 'none').exists()


def test_every_class_name_can_be_drawn_and_looks_its_own():
  words = [val.draw_word(name, 140, (0, 0, 200)) for name in CLASSES]
  assert len({word.tobytes() for word in words}) == 10
  assert {tuple(pixel) for word in words for pixel in word.reshape(-1, 3)} == {(0, 0, 0), (0, 0, 200)}


def test_errors_are_drawn_by_the_command(tmp_path, wide_awake):
  random_records(tmp_path / 'test_batch.bin', 12)
  out = tmp_path / 'new' / 'errors.png'
  report = run_script('val.py', wide_awake, '--data_dir', tmp_path, '--errors', out).stdout
  correct = int(re.search(r'accuracy (\d+) / 12', report).group(1))
  assert '%s: %d mistakes' % (out, 12 - correct) in report
  assert Image.open(str(out)).size == (8 * 148, 188 * (1 + (12 - correct > 8)))
